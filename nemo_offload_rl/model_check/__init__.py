"""Checks that Megatron computes a model as transformers does, by a small twin of it with random weights."""
