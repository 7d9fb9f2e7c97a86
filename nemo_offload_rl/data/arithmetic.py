"""Generates addition problems, a task with a checkable answer that a tiny model learns in minutes.

A problem is a prompt such as ``07+85=`` with the answer ``092``: both terms are zero-padded to num_digits, the sum to
one digit more, so that all problems with the same num_digits have the same length.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import DataError, Problem

MAX_NUM_DIGITS = 9  # a pair of terms still fits an int64
MAX_NUM_PROBLEMS = 10**6  # drawn at the start, in up to a minute (pairs) and 1.6 GB (validation)
VALIDATION_SHARE = 16
_REJECTED = 1  # part of the seed of wrong sums, so that it differs from the seed of problems
_ENUMERABLE = 10**6
_MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: multiplying by it spreads consecutive numbers evenly

Role = Literal["train", "validation"]


def make_arithmetic(role: Role, num_digits: int, num_problems: int, seed: int) -> list[Problem]:
    """Draws distinct addition problems.

    A hash of the pair of terms alone assigns each pair to training or to validation (one in 16), so training and
    validation problems are disjoint whatever their seeds and sizes.

    Args:
        role: the set to draw from.
        num_digits: digits of each term, 1 to 9.
        num_problems: how many to draw, up to a million.
        seed: seed of the draw.

    Raises:
        DataError: num_digits or the number asked for is out of range, or the set has fewer problems than asked for.
    """
    if not 1 <= num_digits <= MAX_NUM_DIGITS:
        raise DataError(f"data.{role}.num_digits must be 1 to {MAX_NUM_DIGITS}, found {num_digits}.")
    if num_problems > MAX_NUM_PROBLEMS:
        raise DataError(
            f"data.{role}.num_problems must be at most {MAX_NUM_PROBLEMS:,}, since all are drawn at the start, found "
            f"{num_problems:,}: ask for fewer."
        )
    num_pairs = 10 ** (2 * num_digits)
    rng = np.random.Generator(np.random.Philox(seed))
    if num_pairs <= _ENUMERABLE:
        candidates = rng.permutation(num_pairs)
    else:
        oversampling = VALIDATION_SHARE * 2 if role == "validation" else 2
        candidates = _without_repeats(rng.integers(num_pairs, size=oversampling * num_problems + 1000))
    drawn = candidates[_is_validation(candidates) == (role == "validation")]
    if len(drawn) < num_problems:
        raise DataError(
            f"data.{role}.num_problems is {num_problems}, but only {len(drawn)} additions of {num_digits}-digit "
            f"numbers are set aside for {role}: ask for fewer, or raise num_digits."
        )
    return [_problem(int(pair), num_digits) for pair in drawn[:num_problems]]


def make_arithmetic_pairs(role: Role, num_digits: int, num_pairs: int, seed: int) -> list[PreferencePair]:
    """Draws distinct problems, each with its correct sum as the chosen answer and a near miss as the rejected one.

    The near miss differs by one in one decimal place, as after a wrong carry, and is the sum of some other problem.

    Args:
        role: the set to draw from; as with ``make_arithmetic``, the sets share no problem.
        num_digits: digits of each term, 1 to 9.
        num_pairs: how many to draw, up to a million.
        seed: seed of the draw.

    Raises:
        DataError: num_digits or the number asked for is out of range, or the set has fewer problems than asked for.
    """
    problems = make_arithmetic(role, num_digits, num_pairs, seed)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, _REJECTED])))
    largest = 2 * (10**num_digits - 1)
    offsets = [sign * 10**place for place in range(num_digits + 1) for sign in (1, -1)]
    pairs = []
    for problem in problems:
        right = int(problem.answer)
        wrong = [right + offset for offset in offsets if 0 <= right + offset <= largest]
        rejected = f"{wrong[rng.integers(len(wrong))]:0{num_digits + 1}d}"
        pairs.append(PreferencePair(problem.context, problem.answer, rejected))
    return pairs


def _is_validation(pairs: np.ndarray) -> np.ndarray:
    mixed = pairs.astype(np.uint64) * _MIXER
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIXER
    return (mixed >> np.uint64(32)) % np.uint64(VALIDATION_SHARE) == 0


def _without_repeats(values: np.ndarray) -> np.ndarray:
    _, first = np.unique(values, return_index=True)
    return values[np.sort(first)]


def _problem(pair: int, num_digits: int) -> Problem:
    left, right = divmod(pair, 10**num_digits)
    return Problem(
        prompt=f"{left:0{num_digits}d}+{right:0{num_digits}d}=",
        answer=f"{left + right:0{num_digits + 1}d}",
    )
