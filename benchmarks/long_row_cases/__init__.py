"""Implements what benchmarks/long_rows.py compares."""
