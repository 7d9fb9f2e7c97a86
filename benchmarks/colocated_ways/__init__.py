"""Implements benchmarks/colocated.py: three settings of one GRPO run, and what is measured in them."""
