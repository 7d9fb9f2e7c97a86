"""Implements what benchmarks/cpu_optimizer.py compares."""
