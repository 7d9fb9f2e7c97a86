"""Reads recipes as text: YAML whose values know their line, `${...}`, and command-line overrides."""
