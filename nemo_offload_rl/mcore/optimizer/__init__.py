"""Optimizer state on the GPU and the CPU, and the check that steps change parameters."""
