"""Measures the wall-clock seconds of the named phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Timer:
    """Adds up the seconds spent in each phase since the last reset.

    A phase entered more than once is summed. Phases may nest; the outer one's seconds then include the inner one's, so
    do not nest phases whose seconds should add up to a total.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._around: Callable[[str], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block towards `name`, even if the block raises."""
        start = time.perf_counter()
        try:
            with self._around(name):
                yield
        finally:
            self.add(name, time.perf_counter() - start)

    @contextmanager
    def within(self, around: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
        """Runs the phases inside of the `with` block in contexts that `around` makes from their names."""
        self._around = around
        try:
            yield
        finally:
            self._around = nullcontext

    def add(self, name: str, seconds: float) -> None:
        """Counts seconds that were measured elsewhere towards `name`."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Returns phase -> seconds, in the order in which the phases first ended."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Forgets every phase."""
        self._seconds.clear()
