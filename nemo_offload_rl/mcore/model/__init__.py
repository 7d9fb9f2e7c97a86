"""Makes Megatron's configs and layer specs of a recipe's policy section."""
