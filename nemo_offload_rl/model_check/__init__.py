"""Checks that Megatron computes a model as transformers does, with a small randomly initialized twin of the model."""
