"""Adapters that run the residency engine in other trainers; import the module of a trainer by name."""
