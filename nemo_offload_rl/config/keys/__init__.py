"""Checks a recipe's keys against the schema and Megatron's fields, and fills in absent ones."""
