"""Defines the error of data that a recipe names."""


class DataError(ValueError):
    """Says that a dataset, a template or a tokenizer cannot be used; the message is for the user."""
