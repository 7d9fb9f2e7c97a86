"""Errors of data that a recipe names."""


class DataError(ValueError):
    """A dataset, a template or a tokenizer that cannot be used; the message is for the user."""
