"""Megatron policies for RL post-training that share their GPUs with generation."""

__version__ = "0.1.0"
