"""Handles what only NeMo-RL's recipes have: keys of features that this package lacks, and its durations."""
