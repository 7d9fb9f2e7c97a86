"""Moves training state in the ways of several trainers, side by side."""
