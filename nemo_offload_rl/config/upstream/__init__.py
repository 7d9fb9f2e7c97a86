"""Handles what stands only in NeMo-RL's recipes: keys of features that this package lacks, and its durations."""
