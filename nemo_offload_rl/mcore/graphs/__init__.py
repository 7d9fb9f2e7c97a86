"""Captures and replays Transformer Engine's CUDA graphs in the training step."""
