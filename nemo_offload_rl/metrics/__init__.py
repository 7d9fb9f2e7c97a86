"""Timing, memory, logging and reporting: leaves that know nothing of training."""
