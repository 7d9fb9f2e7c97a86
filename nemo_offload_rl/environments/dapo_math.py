r"""Implements DAPO's math reward: it normalises the text after the last `Answer:` and compares it as text.

The normalisation is Minerva's (https://arxiv.org/abs/2206.14858, appendix D), as in DAPO and NeMo-RL.
"""

from __future__ import annotations

import re

# Number of characters at the end of a response that are searched; the longest answer of MATH-500 has 159.
TAIL_CHARS = 300
_NO_ANSWER = "[INVALID]"
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# Replacements, applied in this order.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
# Texts that are removed afterwards, in this order: units, words around numbers, and TeX spacing.
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
# TeX rules, applied last: keep only the formula, unwrap commands, and add missing braces around arguments.
_TEX = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def dapo_math_verify(response: str, answer: str) -> float:
    """Returns 1 if the response's last `Answer:` equals the known answer after normalisation of both, otherwise 0."""
    stated = _ANSWER.findall(response[-TAIL_CHARS:])
    return float(normalize_answer(stated[-1] if stated else _NO_ANSWER) == normalize_answer(answer))


def normalize_answer(answer: str) -> str:
    """Normalises an answer: removes units, spacing and formatting, so that equal answers mostly become equal texts."""
    text = answer.rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    for pattern, replacement in _TEX:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
