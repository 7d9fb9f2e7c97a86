"""Provides copy streams, their events, and a clock for waits; without a GPU the calling thread makes the copies."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import torch


class Event(Protocol):
    """Marks a point in a stream's work."""

    def wait(self) -> None:
        """Block the calling thread until the event is reached."""
        ...

    def wait_on_current_stream(self) -> None:
        """Makes later work of the caller's stream wait for the event."""
        ...

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Makes later work of a stream wait for the event."""
        ...

    def seconds_since(self, earlier: Self) -> float:
        """Returns the seconds from `earlier` to this event, both reached; below 0 if `earlier` was reached later."""
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
        """Does nothing: copies on a CPU are complete when the event is recorded."""

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
        """Queue copies of (destination, source) pairs, changing the current stream only once for all of them."""
        if self.stream is None:
            for destination, source in pairs:
                destination.copy_(source)
            return
        # As `torch.cuda.stream` without its device checks: that takes 9 us on the host of an H200, this a third.
        current = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self.stream)
        try:
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(current)

    def mark(self, *, spins: bool = False) -> Event:
        """Records an event after the copies queued so far.

        Args:
            spins: whether a thread that waits for the event polls it: it returns some 0.5 ms sooner, and keeps a core
                busy.
        """
        return _HostEvent() if self.stream is None else _CudaEvent(self.stream, spins=spins)


def record_current_stream(device: torch.device) -> Event:
    """Records an event after the work queued on the caller's stream so far."""
    return _CudaEvent(torch.cuda.current_stream(), spins=False) if device.type == "cuda" else _HostEvent()


@dataclass
class Waits:
    """Holds the measurements of a `WaitClock`; 0 until it has stopped."""

    seconds_waited: float = 0.0
    """Sum of all waits; a wait that delayed nothing still counts some microseconds."""
    seconds: float = 0.0
    """Time from the clock's start to its stop."""


class WaitClock:
    """Times the waits of the caller's stream, and its whole work from the clock's start to its stop.

    Args:
        mark: records an event on the stream that is current when it is called. Waits may be on several streams and
            threads, as in backward passes, as long as both ends of a wait are recorded on the same one.
    """

    def __init__(self, mark: Callable[[], Event]) -> None:
        self._mark = mark
        self._held: list[tuple[Event, Event]] = []

    @contextmanager
    def running(self) -> Iterator[Waits]:
        """Run the clock inside the context, whose end waits for the stream and fills in the yielded `Waits`."""
        waits = Waits()
        start = self._mark()
        yield waits
        stop = self._mark()
        stop.wait()
        waits.seconds = stop.seconds_since(start)
        for before, after in self._held:
            after.wait()  # it may be on another stream
            waits.seconds_waited += after.seconds_since(before)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Times the stream waits that are queued inside; not for graph captures, where events have no time."""
        before = self._mark()
        yield
        self._held.append((before, self._mark()))
