"""What every run needs, whatever its algorithm: checks before Ray starts, the training loop, checkpoints, signals."""
