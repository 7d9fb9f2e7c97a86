"""Implements benchmarks/optimizer_offload.py: ways to move tensors, cases to move, bars to reach."""
