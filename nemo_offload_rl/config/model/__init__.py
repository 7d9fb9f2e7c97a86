"""Checks the recipe's model by its Hugging Face config and folder, before the run builds anything."""
