"""Sets up a rank's process groups, and runs collectives over all ranks."""
