"""Records moments of several processes on one clock: each appends JSON lines to its own file."""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER_VARIABLE = "COLOCATED_MARKS"
"""Environment variable that names the folder; processes without it note nothing."""


@dataclass(frozen=True)
class Mark:
    """Describes something that happened.

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
    """Records moments of this process.

    Args:
        process: names the file.
    """

    def __init__(self, process: str) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        self._path = None if folder is None else Path(folder) / f"{process}-{os.getpid()}.jsonl"

    def note(self, name: str, at_s: float | None = None, seconds: float = 0.0) -> None:
        """Appends a mark, at the present moment where `at_s` is None."""
        if self._path is None:
            return
        mark = Mark(name, time.monotonic() if at_s is None else at_s, seconds)
        with self._path.open("a") as file:
            file.write(json.dumps({"name": name, "at_s": mark.at_s, "seconds": seconds}) + "\n")

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records how long the `with` block takes."""
        start = time.monotonic()
        yield
        end = time.monotonic()
        self.note(name, end, end - start)

    def watch(self, thing: object, methods: Mapping[str, str | Callable[..., str]]) -> None:
        """Records how long each call of some methods of one object takes.

        Args:
            thing: whose methods are replaced.
            methods: the span's name by the method's; or what makes it of the call's arguments.
        """
        for method, called in methods.items():
            setattr(thing, method, self._watched(getattr(thing, method), called))

    def _watched(self, method: Callable[..., Any], called: str | Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(*arguments: Any, **named: Any) -> Any:
            with self.span(called if isinstance(called, str) else called(*arguments, **named)):
                return method(*arguments, **named)

        return watched


def with_tags(verb: str, tags: Sequence[str] | None) -> str:
    """Names a call by the kinds of an engine's memory that it concerns."""
    return f"{verb} {' and '.join(tags or ['all'])}"


def read_marks(folder: Path) -> list[Mark]:
    """Returns the marks of all processes, the earliest first."""
    marks = [
        Mark(**json.loads(line), process=path.stem)
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted(marks, key=lambda mark: mark.at_s)


class StreamMoments:
    """Records when the current stream reaches a place in its work, without waiting for it there.

    Args:
        device: where the work is; on a CPU a place is reached when it is noted.
        marks: get the moments.
    """

    def __init__(self, device: torch.device, marks: Marks) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks = marks
        self._anchor: _Anchor | None = None
        self._pending: list[_Place] = []

    def anchor(self) -> None:
        """Ties the stream's clock to the machine's; it waits for the stream, so call it while the stream is idle."""
        event = _record() if self._on_gpu else None
        if event is not None:
            event.synchronize()
        self._anchor = _Anchor(event, time.monotonic())

    def note(self, name: str, *, again: bool = False) -> None:
        """Records the end of the work queued so far.

        Args:
            name: what for.
            again: in place of the moment of that name since `anchor`.
        """
        if self._anchor is None:
            return
        if again:
            self._pending = [one for one in self._pending if (one.name, one.anchor) != (name, self._anchor)]
        self._pending.append(_Place(name, self._anchor, _record() if self._on_gpu else None, time.monotonic()))

    def at_s(self, event: Any) -> float | None:
        """Returns when a `torch.cuda.Event` was reached, on the machine's clock; None before the first `anchor`."""
        return None if self._anchor is None else self._anchor.at_s(event)

    def resolve(self) -> None:
        """Writes down the recorded moments; waits for them."""
        for place in self._pending:
            if place.event is not None:
                place.event.synchronize()
            self._marks.note(place.name, place.queued_s if place.event is None else place.anchor.at_s(place.event))
        self._pending.clear()


@dataclass(frozen=True, eq=False)
class _Anchor:
    event: Any
    """None without a GPU."""
    reached_s: float

    def at_s(self, event: Any) -> float:
        return self.reached_s + float(self.event.elapsed_time(event)) / 1e3


@dataclass(frozen=True)
class _Place:
    name: str
    anchor: _Anchor
    event: Any
    """None without a GPU."""
    queued_s: float


def _record() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
