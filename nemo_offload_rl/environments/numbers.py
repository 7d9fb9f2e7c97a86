"""Reads the last number of a text as an exact fraction."""

from __future__ import annotations

import re
from fractions import Fraction

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
