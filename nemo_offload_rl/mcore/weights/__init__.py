"""Exports weights under Hugging Face names, and checks the names before weights are loaded."""
