"""Training loops, losses and advantages."""
