"""Runs a recipe of any algorithm: checks before Ray starts, the training loop, checkpoints, signals."""
