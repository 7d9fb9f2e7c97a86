"""Streams optimizer state from the host through a window of GPU memory while the optimizer steps."""
