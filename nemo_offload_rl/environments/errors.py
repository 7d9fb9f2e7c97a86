"""Errors of rewards that a recipe names."""


class RewardError(ValueError):
    """Says that a reward that a recipe names, or what it returned, cannot be used; the message is for the user."""
