"""Moments of several processes on one clock: each process appends its own to a file, one JSON object a line."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER_VARIABLE = "COLOCATED_MARKS"
"""Environment variable that names the folder; processes without it note nothing."""


@dataclass(frozen=True)
class Mark:
    """Something that happened.

    Attributes:
        name: what.
        at_s: when it ended, by the machine's monotonic clock.
        seconds: how long it took; 0 for a moment.
        process: the file that it was read from.
    """

    name: str
    at_s: float
    seconds: float = 0.0
    process: str = ""


class Marks:
    """Notes moments of this process.

    Args:
        process: names the file.
    """

    def __init__(self, process: str) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        self._path = None if folder is None else Path(folder) / f"{process}-{os.getpid()}.jsonl"

    def note(self, name: str, at_s: float | None = None, seconds: float = 0.0) -> None:
        """Append a mark; the present moment where `at_s` is None."""
        if self._path is None:
            return
        mark = Mark(name, time.monotonic() if at_s is None else at_s, seconds)
        with self._path.open("a") as file:
            file.write(json.dumps({"name": name, "at_s": mark.at_s, "seconds": seconds}) + "\n")

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note how long the `with` block takes."""
        start = time.monotonic()
        yield
        end = time.monotonic()
        self.note(name, end, end - start)


def read_marks(folder: Path) -> list[Mark]:
    """Returns the marks of all processes, the earliest first."""
    marks = [
        Mark(**json.loads(line), process=path.stem)
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted(marks, key=lambda mark: mark.at_s)


class StreamMoments:
    """Notes when the current stream comes to a place in its work, without waiting for it there.

    Args:
        device: where the work is; on a CPU a place is reached when it is noted.
        marks: get the moments.
    """

    def __init__(self, device: torch.device, marks: Marks) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks = marks
        self._anchor: tuple[Any, float] | None = None
        self._pending: list[tuple[str, Any, tuple[Any, float]]] = []

    def anchor(self) -> None:
        """Tie the stream's clock to the machine's; waits for the stream, so call it while that is idle."""
        if self._on_gpu:
            event = _record()
            event.synchronize()
            self._anchor = event, time.monotonic()

    def note(self, name: str) -> None:
        """Note the end of what was queued until now."""
        if not self._on_gpu:
            self._marks.note(name)
        elif self._anchor is not None:
            self._pending.append((name, _record(), self._anchor))

    def resolve(self) -> None:
        """Write down what has been noted; waits for it."""
        for name, event, (anchor, at_s) in self._pending:
            event.synchronize()
            self._marks.note(name, at_s + anchor.elapsed_time(event) / 1e3)
        self._pending.clear()


def _record() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
