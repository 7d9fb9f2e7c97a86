"""Copies of activations between GPU and host, each direction on a stream of its own."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch

from nemo_offload_rl.offload.lanes import Lane, mark_current_stream
from nemo_offload_rl.offload.wait_clock import WaitClock, Waits


class Ticket(Protocol):
    """Some copies that were asked for."""

    def reached(self) -> bool:
        """Whether they are done."""
        ...

    def covers(self, other: "Ticket") -> bool:
        """Whether the other copies are done once these are."""
        ...


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Destination and source of each copy, uint8 and as long as each other."""


class CopyEngine(Protocol):
    """Copies in the order that tickets say, and in no other."""

    def is_capturing(self) -> bool:
        """Whether what the caller's stream is given becomes part of a CUDA graph."""
        ...

    def out(self, pairs: Pairs, after: Iterable[Ticket]) -> Ticket:
        """To the host: after what the caller's stream has been given, and after `after`."""
        ...

    def back(self, pairs: Pairs, after: Iterable[Ticket]) -> Ticket:
        """To the GPU: after what the caller's stream has been given, since the GPU's memory was free only there."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """What the caller's stream is given from now on runs after these copies."""
        ...

    def timed_waits(self) -> AbstractContextManager[Waits]:
        """Time what the caller's streams wait inside; an engine whose waits cannot be timed counts none."""
        return nullcontext(Waits())


class _Event(Ticket):
    """The copies that a lane has been given so far; it makes them in order."""

    def __init__(self, lane: Lane, number: int) -> None:
        assert lane.stream is not None
        self._lane, self._number = lane, number
        self.event = torch.cuda.Event()
        self.event.record(lane.stream)

    def reached(self) -> bool:
        return bool(self.event.query())

    def covers(self, other: Ticket) -> bool:
        return isinstance(other, _Event) and self._lane is other._lane and self._number >= other._number


class CudaCopies(CopyEngine):
    """Two streams, and an event for each group of copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device(device).index  # a number spares each call three of torch's
        self.lanes = {"out": Lane(device), "back": Lane(device)}
        self._num_asked = 0
        self._mark = partial(mark_current_stream, torch.device(device))
        self._clock: WaitClock | None = None  # and no null object: it is asked for in each wait of each step

    def is_capturing(self) -> bool:
        """See `CopyEngine`."""
        return torch.cuda.is_current_stream_capturing()

    def out(self, pairs: Pairs, after: Iterable[Ticket]) -> Ticket:
        """See `CopyEngine`."""
        return self._copy(self.lanes["out"], pairs, after)

    def back(self, pairs: Pairs, after: Iterable[Ticket]) -> Ticket:
        """See `CopyEngine`."""
        return self._copy(self.lanes["back"], pairs, after)

    def wait(self, ticket: Ticket) -> None:
        """See `CopyEngine`."""
        assert isinstance(ticket, _Event)
        stream = torch.cuda.current_stream(self._device)
        if self._clock is None or self.is_capturing():
            stream.wait_event(ticket.event)
            return
        with self._clock.wait():
            stream.wait_event(ticket.event)

    @contextmanager
    def timed_waits(self) -> Iterator[Waits]:
        """See `CopyEngine`; waits under capture are left out."""
        self._clock = WaitClock(self._mark)
        try:
            with self._clock.running() as waits:
                yield waits
        finally:
            self._clock = None

    def _copy(self, lane: Lane, pairs: Pairs, after: Iterable[Ticket]) -> Ticket:
        assert lane.stream is not None
        lane.follow_current_stream()
        for ticket in dict.fromkeys(after):  # most of them are one: that of a group, or that of the last copy
            assert isinstance(ticket, _Event)
            lane.stream.wait_event(ticket.event)
        lane.copy_all(pairs)
        self._num_asked += 1
        return _Event(lane, self._num_asked)
