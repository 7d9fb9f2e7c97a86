"""The ways in which trainers move training state, side by side."""
