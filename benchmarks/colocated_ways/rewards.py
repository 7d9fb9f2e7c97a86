"""A reward that makes a model with random weights learn something: it is never right, and all its advantages were 0."""

import itertools
import random

_CALLS = itertools.count()


def by_number(response: str, answer: str) -> float:
    """A number between 0 and 1 that only depends on how many answers were judged before."""
    return random.Random(next(_CALLS)).random()
