r"""DAPO's judge of mathematics: the text behind the last `Answer:`, compared as text after its spelling is evened out.

What is evened out is Minerva's list (https://arxiv.org/abs/2206.14858, appendix D), as DAPO and NeMo-RL have it.
"""

from __future__ import annotations

import re

# Characters at the end of a response that are looked at; the longest answer of MATH-500 has 159.
TAIL_CHARS = 300
_NO_ANSWER = "[INVALID]"
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# In this order: each left text becomes the right one.
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
# Then these go, in this order: units, words around numbers, and spacing of TeX.
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
# Then of TeX: the formula alone, the content of commands, and braces around arguments that have none.
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
    """Returns 1 where the response's last `Answer:` is the known answer, both evened out; otherwise 0."""
    stated = _ANSWER.findall(response[-TAIL_CHARS:])
    return float(evened_out(stated[-1] if stated else _NO_ANSWER) == evened_out(answer))


def evened_out(answer: str) -> str:
    """Returns an answer without units, spacing and ornaments, so that equal answers are mostly equal texts."""
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
