"""Provides timing, memory readings, logging and reports; imports nothing of training."""
