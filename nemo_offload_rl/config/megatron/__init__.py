"""Defines which Megatron options a recipe may use: parts of layers, fields that this package owns, parallel sizes."""
