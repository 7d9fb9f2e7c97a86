"""Errors of rewards that a recipe names."""


class RewardError(ValueError):
    """A reward that a recipe names cannot be used, or what it returned; the message is for the user."""
