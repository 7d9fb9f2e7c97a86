"""Reads the last number of a text as an exact fraction."""

from __future__ import annotations

import re
from fractions import Fraction

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
# A minus after a word or a closing bracket is a subtraction; a digit right after a letter belongs to a name.
_NUMBER = re.compile(rf"(?<![\w.)\]])[-\u2212]?(?:{_INTEGER}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*{_INTEGER})?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_LATEX_SPACING = re.compile(r"\\[,!;: ]|\{,\}(?=\d{3})")


def final_number(text: str) -> Fraction | None:
    r"""Returns the last number in a text, or in its last ``\boxed{...}`` if it has one; None where there is no number.

    It reads signs, thousands separators, decimals, exponents, ``3/4`` and ``\frac{3}{4}``.
    """
    boxed = last_boxed(text)
    searched = _LATEX_FRACTION.sub(r"\1/\2", text if boxed is None else boxed)
    searched = _LATEX_SPACING.sub(lambda match: "," if match.group().startswith("{") else "", searched)
    numbers = _NUMBER.findall(searched)
    return _value(numbers[-1]) if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete ``\boxed{...}``, including inner braces; None where there is none."""
    marker = r"\boxed{"
    start = text.rfind(marker)
    while start >= 0:
        depth = 0
        for position in range(start + len(marker) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len(marker) : position]
        start = text.rfind(marker, 0, start)
    return None


def _value(number: str) -> Fraction | None:
    numerator, _, denominator = number.replace(",", "").replace("\u2212", "-").partition("/")
    if not denominator:
        return Fraction(numerator.strip())
    return Fraction(numerator.strip()) / int(denominator) if int(denominator) != 0 else None
