"""A reward that a model with random weights can get, so that a short run has something to learn from."""

import os


def starts_low(response: str, answer: str) -> float:
    """1 if the response begins with a digit below five, whatever was asked."""
    return float(response[:1] in ("0", "1", "2", "3", "4"))


def not_a_number(response: str, answer: str) -> float:
    """NaN, as a division of nothing by nothing would give."""
    return float("nan")


def noted(response: str, answer: str) -> float:
    """The same; each call is a byte more in the file that REWARDS_FILE names."""
    with open(os.environ["REWARDS_FILE"], "a") as file:
        file.write(".")
    return starts_low(response, answer)
