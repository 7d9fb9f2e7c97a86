"""Places processes: Ray's placement, and the machine's topology."""
