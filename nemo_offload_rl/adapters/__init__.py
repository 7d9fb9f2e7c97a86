"""The residency engine in other trainers; each module is imported only where it is asked for by name."""
