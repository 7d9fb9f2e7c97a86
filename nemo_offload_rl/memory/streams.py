"""Streams for copies, their events, and a clock for waits; without a GPU the calling thread makes the copies."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import torch


class Event(Protocol):
    """Marks a point in a stream's work."""

    def wait(self) -> None:
        """The caller waits until it is reached."""
        ...

    def wait_on_current_stream(self) -> None:
        """Makes later work of the caller's stream wait for it."""
        ...

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Makes later work of a stream wait for it."""
        ...

    def seconds_since(self, earlier: Self) -> float:
        """Returns the seconds from `earlier` to here, both of them reached; below 0 if `earlier` was reached later."""
        ...


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream, *, spins: bool) -> None:
        # A helper thread that waits for half a second must not spin on a core meanwhile.
        self._event = torch.cuda.Event(enable_timing=True, blocking=not spins)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def wait_on_current_stream(self) -> None:
        self.hold(torch.cuda.current_stream())

    def hold(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)

    def seconds_since(self, earlier: Self) -> float:
        return earlier._event.elapsed_time(self._event) / 1000


class _HostEvent:
    def __init__(self) -> None:
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Copies on a CPU have been made when they are marked."""

    def wait_on_current_stream(self) -> None:
        """Does nothing: there are no streams on a CPU."""

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Does nothing: there are no streams on a CPU."""

    def seconds_since(self, earlier: Self) -> float:
        return self._time - earlier._time


class CopyStream:
    """Queues copies in one direction on a stream of its own; without a GPU, the calling thread makes them."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = None if self.stream is None else self.stream.device_index

    def follow_current_stream(self) -> None:
        """Makes later copies wait for all work queued on the caller's stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def follow(self, mark: Event) -> None:
        """Makes later copies wait for an event of another copy stream."""
        if self.stream is not None:
            mark.hold(self.stream)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""
        self.copy_all([(destination, source)])

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue copies, each of a destination and its source, and change the caller's stream once for all of them."""
        if self.stream is None:
            for destination, source in pairs:
                destination.copy_(source)
            return
        # As `torch.cuda.stream`, which asks about devices first: 9 us on the host of an H200, this takes a third.
        current = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self.stream)
        try:
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(current)

    def mark(self, *, spins: bool = False) -> Event:
        """Records the copies queued so far.

        Args:
            spins: a thread that waits for it learns of it some 0.5 ms sooner, and keeps a core busy.
        """
        return _HostEvent() if self.stream is None else _CudaEvent(self.stream, spins=spins)


def record_current_stream(device: torch.device) -> Event:
    """Records the work queued on the caller's stream so far."""
    return _CudaEvent(torch.cuda.current_stream(), spins=False) if device.type == "cuda" else _HostEvent()


@dataclass
class Waits:
    """Holds what a `WaitClock` has measured; 0 until it has been stopped."""

    seconds_waited: float = 0.0
    """All waits together; some microseconds are counted for one that held nothing up."""
    seconds: float = 0.0
    """All time from the clock's start to its stop."""


class WaitClock:
    """Times waits of the caller's stream, and all that the stream is given meanwhile.

    Args:
        mark: records an event on the stream that is current when it is called. Streams and threads may be several,
            as in backward passes, as long as each of them records both ends of a wait.
    """

    def __init__(self, mark: Callable[[], Event]) -> None:
        self._mark = mark
        self._held: list[tuple[Event, Event]] = []

    @contextmanager
    def running(self) -> Iterator[Waits]:
        """Start and stop; what it yields is filled in at the end, when the stream has got there."""
        waits = Waits()
        start = self._mark()
        yield waits
        stop = self._mark()
        stop.wait()
        waits.seconds = stop.seconds_since(start)
        for before, after in self._held:
            after.wait()  # it may be of another stream
            waits.seconds_waited += after.seconds_since(before)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Times what the stream is told to wait for inside; not in a capture, where events have no time."""
        before = self._mark()
        yield
        self._held.append((before, self._mark()))
