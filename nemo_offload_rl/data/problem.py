"""The one kind of sample that datasets hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A prompt, and the answer that a response is compared with or, in SFT, trained towards."""

    prompt: str
    answer: str


ProblemSet = Sequence[Problem]
