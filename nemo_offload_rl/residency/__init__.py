"""Moves training state between phases; usable with any megatron-core model, without Ray or recipes."""
