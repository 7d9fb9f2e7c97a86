"""Defines the error of rewards that a recipe names."""


class RewardError(ValueError):
    """Says that a recipe's reward, or a value that it returned, cannot be used; the message is for the user."""
