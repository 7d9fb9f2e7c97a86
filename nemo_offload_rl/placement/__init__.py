"""Where processes run: Ray's placement, and the machine's topology."""
