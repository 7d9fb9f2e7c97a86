"""Computes a response's reward, a number, from its text and the known answer."""

from __future__ import annotations

import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from numbers import Real
from types import MappingProxyType
from typing import Protocol

# Python converts integers of up to 640 digits whatever limit it was started with (sys.set_int_max_str_digits); to write
# out 1e5000000 as an integer takes 20 s.
MAX_CHARS = 640
MAX_EXPONENT = 1000

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_MIXED = "\u2064"  # Unicode's invisible plus, between the integer and the fraction of a mixed number
# A minus after a word or a closing bracket is a subtraction; a digit right after a letter belongs to a name, but not in
# Chinese, Japanese, Thai and others (from U+0E00 on), which have no blank between a word and a number.
_NUMBER = re.compile(
    rf"(?<![\d.)\]]|[^\W\u0e00-\U0010ffff])[-\u2212]?(?:{_INTEGER}{_MIXED})?"
    rf"(?:{_INTEGER}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*{_INTEGER})?"
)
_LATEX_MIXED = re.compile(r"(?<=\d) ?\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_LATEX_SPACING = re.compile(r"\\[,!;: ]|\{,\}(?=\d{3})")
_BRACE = re.compile(r"\\boxed\{|[{}]")


class NumberTooLargeError(ValueError):
    """Says that a number has too many characters, or too large an exponent, to be compared."""


def final_number(text: str) -> Fraction | None:
    r"""Returns the last number in a text, or in its last ``\boxed{...}`` if it has one; None where there is no number.

    It reads signs, thousands separators, decimals, exponents, ``3/4``, ``\frac{3}{4}`` and ``1\frac{3}{4}``.

    Raises:
        NumberTooLargeError: that number has more than ``MAX_CHARS`` characters, or an exponent beyond ``MAX_EXPONENT``.
    """
    boxed = last_boxed(text)
    searched = text if boxed is None else boxed
    searched = _LATEX_SPACING.sub(lambda match: "," if match.group().startswith("{") else "", searched)
    searched = _LATEX_MIXED.sub(rf"{_MIXED}\1/\2", searched)
    searched = _LATEX_FRACTION.sub(r"\1/\2", searched)
    numbers = _NUMBER.findall(searched)
    return _value(numbers[-1]) if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete ``\boxed{...}``, including inner braces; None where there is none."""
    opened: list[re.Match[str]] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace.group() != "}":
            opened.append(brace)
        elif opened:
            opening = opened.pop()
            is_boxed = opening.group() != "{"
            if is_boxed and (last is None or opening.end() > last[0]):  # of nested boxes, the inner one
                last = (opening.end(), brace.start())
    return None if last is None else text[last[0] : last[1]]


def _value(number: str) -> Fraction | None:
    digits = number.replace(",", "").replace("\u2212", "-").lower()
    _require_moderate(digits)
    sign = -1 if digits.startswith("-") else 1
    whole, _, fraction = digits.removeprefix("-").rpartition(_MIXED)
    numerator, _, denominator = fraction.partition("/")
    divisor = int(denominator or 1)
    return sign * (int(whole or 0) + Fraction(numerator.strip()) / divisor) if divisor else None


def _require_moderate(number: str) -> None:
    exponent = number.partition("/")[0].partition("e")[2] or "0"
    if len(number) > MAX_CHARS or abs(int(exponent)) > MAX_EXPONENT:
        shown = number if len(number) <= 30 else f"{number[:27]}..."
        raise NumberTooLargeError(
            f"{shown} has more than {MAX_CHARS} characters or an exponent beyond {MAX_EXPONENT}, and is too large to "
            "be compared: take the answer out of the data"
        )


class RewardError(ValueError):
    """Says that a recipe's reward, or a value that it returned, cannot be used; the message is for the user."""


PYTHON = "python"
_LARGEST = (2 - 2**-23) * 2.0**127  # the largest float32, the dtype of reward tensors
_MAX_CAUSE_CHARS = 200
_shortened = reprlib.Repr(maxstring=80, maxother=80).repr


@dataclass(frozen=True)
class Case:
    """Holds a response that is to be judged.

    Attributes:
        prompt: text of the prompt.
        response: text of the response.
        answer: the known answer.
    """

    prompt: str
    response: str
    answer: str


@dataclass(frozen=True)
class Judgements:
    """Holds the rewards of responses.

    Attributes:
        rewards: one reward per case.
        num_unjudged: number of cases that could not be judged and therefore have reward 0.
    """

    rewards: list[float]
    num_unjudged: int = 0


class Judge(Protocol):
    """Defines how responses are judged."""

    def judge_all(self, cases: Sequence[Case]) -> Judgements:
        """Judges cases; returns their rewards in the same order.

        Raises:
            RewardError: the reward cannot be computed, and the run must end.
        """

    def shutdown(self) -> None:
        """Ends the judge's processes, if it has any."""


def exact_match(response: str, answer: str) -> float:
    """Returns 1 if the response equals the answer, ignoring blanks at either end, otherwise 0."""
    return float(response.strip() == answer.strip())


def numeric_match(response: str, answer: str) -> float:
    """Returns 1 if the response's last number (or last boxed one) equals the answer's exactly, otherwise 0.

    Raises:
        NumberTooLargeError: the answer's number is too large to be compared; a response with such a number gets 0.
    """
    expected = final_number(answer)
    try:
        return float(expected is not None and final_number(response) == expected)
    except NumberTooLargeError:
        return 0.0


REWARDS: Mapping[str, Callable[[str, str], float]] = MappingProxyType(
    {"exact_match": exact_match, "numeric_match": numeric_match}
)


@dataclass(frozen=True)
class Reward:
    """Judges responses with a function, and checks the function's results.

    Attributes:
        name: the reward's name in the recipe.
        function: maps the response and the known answer to a number.
    """

    name: str
    function: Callable[[str, str], object]

    def judge_all(self, cases: Sequence[Case]) -> Judgements:
        """Judges the cases in this process; see ``Judge``."""
        return Judgements([self.judge(case.prompt, case.response, case.answer) for case in cases])

    def shutdown(self) -> None:
        """Does nothing, since the reward has no processes."""

    def judge(self, prompt: str, response: str, answer: str) -> float:
        """Calls the function with the response and the answer.

        Raises:
            RewardError: the function raises, or does not return a finite number; the message names the function, the
                prompt, the response and the known answer.
        """
        case = (
            f"for the answer {_shortened(response)} to the prompt {_shortened(prompt)} "
            f"(known answer: {_shortened(answer)})"
        )
        try:
            reward = self.function(response, answer)
        except Exception as error:  # a user's function may raise anything
            raise RewardError(f"The reward function {self.name} failed {case}: {_cause(error)}.") from error
        number = _number(reward)
        if number is None:
            wanted = "a number"
        elif not abs(number) <= _LARGEST:  # also true for NaN
            wanted = f"a finite number of at most {_LARGEST:.1e} in size"
        else:
            return number
        raise RewardError(f"The reward function {self.name} must return {wanted}, found {_shortened(reward)} {case}.")


def _number(value: object) -> float | None:
    """Returns a number of Python's or NumPy's types as a float, infinity if it is too large; None for other values."""
    numpy = sys.modules.get("numpy")  # imported by whoever made a scalar of it
    if not isinstance(value, Real) and (numpy is None or not isinstance(value, numpy.bool_)):
        return None
    try:
        return float(value)
    except OverflowError:
        return inf


def _cause(error: Exception) -> str:
    """Returns the error's type and message, and the line that raised it."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0][:_MAX_CAUSE_CHARS]}" if lines else type(error).__name__
    return f"{message.rstrip('.')} ({line.filename}, line {line.lineno})"


def make_reward(kind: str) -> Reward:
    """Returns the reward of ``REWARDS`` that a recipe names.

    Raises:
        RewardError: the reward is not known.
    """
    if kind not in REWARDS:
        raise RewardError(f"env.NAME.reward must be one of {', '.join([*REWARDS, PYTHON])}, found {kind!r}.")
    return Reward(kind, REWARDS[kind])
