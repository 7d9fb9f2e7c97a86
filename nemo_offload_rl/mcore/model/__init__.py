"""Makes Megatron's configs and layer specs from a recipe's policy section."""
