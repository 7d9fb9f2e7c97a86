"""The one kind of sample that datasets hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """A prompt, and the answer that a response is compared with or, in SFT, trained towards.

    Attributes:
        prompt: its text.
        answer: its text.
        where: the file and line, or the row, that it was read from; empty for one that was made. Of two problems that
            differ in nothing else, neither is another problem.
    """

    prompt: str
    answer: str
    where: str = field(default="", compare=False)


ProblemSet = Sequence[Problem]
