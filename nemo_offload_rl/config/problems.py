"""The problems of a recipe as a user sees them, each with its key, its place and its remedy."""

import difflib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_PROBLEMS = 100
"""Number of problems that a message lists; finding the nearest valid key takes some milliseconds for each."""


@dataclass(frozen=True)
class Origin:
    """Says where a key was written: a line of a file, or an override (of `file`, or else of the command line)."""

    file: str | None = None
    line: int | None = None
    override: str | None = None

    def __str__(self) -> str:
        if self.override is not None:
            text = self.override if len(self.override) <= 200 else f"{self.override[:197]}..."
            return f"{self.file or 'command line'}: {text}"
        return f"{self.file}:{self.line}" if self.line else f"{self.file}"


@dataclass(frozen=True)
class Problem:
    """Describes a mistake: the key's full path ("" for the whole recipe), where it was written, and what to do."""

    path: str
    origin: Origin | None
    message: str

    def __str__(self) -> str:
        return ": ".join(str(part) for part in (self.origin, self.path, self.message) if part)


class RecipeError(ValueError):
    """Says that a recipe cannot be used; `str()` is the message for the user.

    Attributes:
        problems: every mistake, in the order of the files; the message lists the first `MAX_PROBLEMS`.
    """

    def __init__(self, recipe: str, problems: Sequence[Problem]) -> None:
        self.recipe = recipe
        self.problems = tuple(sorted(problems, key=_place))
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        if len(problems) > MAX_PROBLEMS:
            count = f"more than {MAX_PROBLEMS} problems; the others are listed once these are fixed"
        lines = [f"  {problem}" for problem in self.problems[:MAX_PROBLEMS]]
        super().__init__("\n".join([f"recipe {recipe}: {count}", *lines]))


def _place(problem: Problem) -> tuple[str, int]:
    """Sort key: overrides first, then file by file from top to bottom."""
    origin = problem.origin or Origin()
    return (origin.file or "", origin.line or 0)


def show(value: Any) -> str:
    """Returns the value as YAML writes it on one line, cut after 80 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(show(item) for item in value) + "]"
    else:
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def show_choices(values: Iterable[Any]) -> str:
    """Returns the values as a list in prose: 1, 2 or 3."""
    shown = [show(value) for value in values]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the candidate with the most similar spelling, if one is close; ignores case."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: Any, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the end of a message that names the candidate with the most similar spelling; empty if none is close."""
    close = nearest(name, candidates, cutoff) if isinstance(name, str) else None
    return f"; did you mean {close}?" if close else ""


KEYS_ALIKE = 0.75
"""The `cutoff` of `nearest` for keys: below it, two keys rather share a word than a meaning."""


def nearest_path(path: str, paths: Iterable[str]) -> str | None:
    """Returns the path that ends with the name most like that of `path`, if one is close; of several the most alike."""
    by_name: dict[str, list[str]] = {}
    for other in paths:
        by_name.setdefault(other.rpartition(".")[2], []).append(other)
    close = nearest(path.rpartition(".")[2], by_name, cutoff=KEYS_ALIKE)
    return None if close is None else max(by_name[close], key=lambda p: difflib.SequenceMatcher(None, p, path).ratio())


def unknown_names(names: Iterable[str], known: Iterable[str]) -> str:
    """Returns unknown names as a list in prose, each with the name that the user probably meant."""
    shown = []
    for name in names:
        close = nearest(name, known)
        shown.append(show(name) + (f" (did you mean {close}?)" if close else ""))
    return " and ".join(shown)


def show_file(path: Path) -> str:
    """Returns the path as users would type it: relative to the current folder if it lies below that."""
    if "\0" in str(path):
        return repr(str(path))
    # Path.resolve would fail on circular symbolic links.
    resolved, here = Path(os.path.realpath(path)), Path.cwd()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(path)


def unquoted(value: Any) -> str:
    """Returns the end of a message about a value that should be a number: empty unless it is one in quotes."""
    try:
        return "; write it without quotes" if isinstance(value, str) and math.isfinite(float(value)) else ""
    except ValueError:
        return ""
