"""Runs a recipe, whatever its algorithm: checks before Ray starts, the training loop, checkpoints, signals."""
