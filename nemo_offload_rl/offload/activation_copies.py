"""Copies of activations between GPU and host, each direction on a stream of its own."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from nemo_offload_rl.offload.lanes import Lane


class Ticket(Protocol):
    """Some copies that were asked for."""

    def reached(self) -> bool:
        """Whether they are done."""
        ...


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Destination and source of each copy, uint8 and as long as each other."""


class CopyEngine(Protocol):
    """Copies in the order that tickets say, and in no other."""

    def out(self, pairs: Pairs, after: Iterable[Ticket]) -> Ticket:
        """To the host: after what the caller's stream has been given, and after `after`."""
        ...

    def back(self, pairs: Pairs, after: Iterable[Ticket]) -> Ticket:
        """To the GPU: after what the caller's stream has been given, since the GPU's memory was free only there."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """What the caller's stream is given from now on runs after these copies."""
        ...


class _Event:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def reached(self) -> bool:
        return bool(self.event.query())


class CudaCopies(CopyEngine):
    """Two streams, and an event for each group of copies."""

    def __init__(self, device: torch.device) -> None:
        self.lanes = {"out": Lane(device), "back": Lane(device)}

    def out(self, pairs: Pairs, after: Iterable[Ticket]) -> Ticket:
        """See `CopyEngine`."""
        return self._copy(self.lanes["out"], pairs, after)

    def back(self, pairs: Pairs, after: Iterable[Ticket]) -> Ticket:
        """See `CopyEngine`."""
        return self._copy(self.lanes["back"], pairs, after)

    def wait(self, ticket: Ticket) -> None:
        """See `CopyEngine`."""
        assert isinstance(ticket, _Event)
        torch.cuda.current_stream().wait_event(ticket.event)

    def _copy(self, lane: Lane, pairs: Pairs, after: Iterable[Ticket]) -> Ticket:
        assert lane.stream is not None
        lane.follow_current_stream()
        for ticket in after:
            assert isinstance(ticket, _Event)
            lane.stream.wait_event(ticket.event)
        for destination, source in pairs:
            lane.copy(destination, source)
        return _Event(lane.stream)
