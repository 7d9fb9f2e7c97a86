"""Provides host memory, GPU ranges and copy streams for moving tensors between GPU and host."""
