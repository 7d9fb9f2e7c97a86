"""Adapters that run the residency offloader in other trainers; import the module of a trainer by name."""
