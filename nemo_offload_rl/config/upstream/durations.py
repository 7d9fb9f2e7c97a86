"""Reads durations as NeMo-RL's recipes write them."""

import re

_FORM = re.compile(r"(\d+):(\d+):(\d+):(\d+)")
_SECONDS = (86_400, 3_600, 60, 1)


def duration_s(text: str) -> int | None:
    """Returns the seconds in days:hours:minutes:seconds; None for any other text, and for a duration of 0."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    return sum(int(part) * seconds for part, seconds in zip(found.groups(), _SECONDS, strict=True)) or None
