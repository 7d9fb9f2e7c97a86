"""Defines a reward for models with random weights, which never answer right and would have advantages of 0."""

import itertools
import random

_CALLS = itertools.count()


def by_number(response: str, answer: str) -> float:
    """Returns a number between 0 and 1 that depends only on how many answers were judged before."""
    return random.Random(next(_CALLS)).random()
