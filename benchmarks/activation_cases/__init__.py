"""Implements benchmarks/activation_offload.py: a module for each table, and what they share."""
