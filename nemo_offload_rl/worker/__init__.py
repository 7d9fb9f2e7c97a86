"""The policy worker, its Ray actor, and the handle on all ranks."""
