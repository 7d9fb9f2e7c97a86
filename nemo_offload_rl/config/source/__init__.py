"""Reads a recipe's text: YAML whose values know their line, `${...}`, and command-line overrides."""
