"""Provides a reward that a model with random weights can earn, so that a short run has something to learn."""

import os


def starts_low(response: str, answer: str) -> float:
    """Returns 1 if the response begins with a digit below five, whatever the question."""
    return float(response[:1] in ("0", "1", "2", "3", "4"))


def not_a_number(response: str, answer: str) -> float:
    """Returns NaN, as 0 divided by 0 does."""
    return float("nan")


def noted(response: str, answer: str) -> float:
    """Returns the same, and appends a byte to the file that REWARDS_FILE names."""
    with open(os.environ["REWARDS_FILE"], "a") as file:
        file.write(".")
    return starts_low(response, answer)


def share_of_vowels(response: str, answer: str) -> float:
    """Returns how many of the response's characters are vowels, as a share; hardly two responses have the same."""
    return sum(character in "aeiou" for character in response) / (len(response) + 0.37)
