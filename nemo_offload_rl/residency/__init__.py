"""Where training state lives between phases; usable with any megatron-core model, without Ray or recipes."""
