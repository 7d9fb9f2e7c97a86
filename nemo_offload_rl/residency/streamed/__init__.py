"""Optimizer state that lives on the host, and passes through a window of GPU memory while the optimizer steps."""
