"""One slab of host memory, handed out by bytes, whatever the shapes are."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.offload.activation_copies import Ticket
from nemo_offload_rl.offload.pinned_arena import LOCK_CHUNK_BYTES

ALIGNMENT_BYTES = 4096
"""Regions start on pages, for copies at full speed."""


@dataclass(frozen=True)
class Region:
    """A part of a slab that one storage was given.

    Attributes:
        offset: of its first byte.
        nbytes: what was asked for.
        after: copies out of this part that the next copy into it has to follow.
    """

    offset: int
    nbytes: int
    after: tuple[Ticket, ...]

    @property
    def reserved_bytes(self) -> int:
        """With the padding to the next page."""
        return _aligned(self.nbytes)


@dataclass(frozen=True)
class _Gap:
    offset: int
    nbytes: int
    after: tuple[Ticket, ...]


class HostSlab:
    """First fit over free gaps, which grow together again.

    Regions may be given back from any thread and at any time, also by the garbage collector while a region is being
    taken: they are queued, and the next `take` finds them.

    Args:
        memory: uint8 [nbytes] on the CPU.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        assert memory.dtype == torch.uint8 and memory.dim() == 1
        self.nbytes = len(memory)
        self.used_bytes = 0
        self.peak_bytes = 0
        self._memory = memory
        self._gaps = [_Gap(0, self.nbytes, ())] if self.nbytes else []
        self._returned: deque[tuple[Region, Ticket | None]] = deque()

    def take(self, nbytes: int) -> Region | None:
        """A region of so many bytes; None if no gap is as large."""
        self._collect()
        wanted = _aligned(nbytes)
        for index, gap in enumerate(self._gaps):
            if gap.nbytes < wanted:
                continue
            rest = _Gap(gap.offset + wanted, gap.nbytes - wanted, gap.after)
            self._gaps[index : index + 1] = [rest] if rest.nbytes else []
            self.used_bytes += wanted
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return Region(gap.offset, nbytes, gap.after)
        return None

    def take_all(self, sizes: Sequence[int]) -> list[Region] | None:
        """A region for each number of bytes; None, and nothing taken, if there is no room for all of them."""
        regions: list[Region] = []
        for nbytes in sizes:
            region = self.take(nbytes)
            if region is None:
                for taken in regions:
                    self.give_back(taken, None)
                return None
            regions.append(region)
        return regions

    def forget_reached(self) -> None:
        """Regions that are free do not name copies that are done; where the GPU is idle, none at all."""
        self._collect()
        self._gaps = [
            _Gap(gap.offset, gap.nbytes, tuple(ticket for ticket in gap.after if not ticket.reached()))
            for gap in self._gaps
        ]

    def give_back(self, region: Region, after: Ticket | None) -> None:
        """Return a region.

        Args:
            region: from `take`.
            after: the copy that reads it last, if it may still be under way.
        """
        self._returned.append((region, after))

    def close(self) -> None:
        """Let go of the memory, whoever still knows this slab; there is no room in it any more."""
        self.nbytes = 0
        self._memory = self._memory[:0].clone()
        self._gaps = []
        self._returned.clear()

    def pieces(self, region: Region) -> Iterator[tuple[int, torch.Tensor]]:
        """The region cut where page-locking was (see `LOCK_CHUNK_BYTES`): offset inside it, and uint8 memory."""
        start, end = region.offset, region.offset + region.nbytes
        while start < end:
            stop = min(end, (start // LOCK_CHUNK_BYTES + 1) * LOCK_CHUNK_BYTES)
            yield start - region.offset, self._memory[start:stop]
            start = stop

    def _collect(self) -> None:
        while self._returned:
            region, after = self._returned.popleft()
            self.used_bytes -= region.reserved_bytes
            held = region.after if after is None else (*region.after, after)
            self._insert(_Gap(region.offset, region.reserved_bytes, _last(held)))

    def _insert(self, gap: _Gap) -> None:
        at = next((i for i, other in enumerate(self._gaps) if other.offset > gap.offset), len(self._gaps))
        if at < len(self._gaps) and gap.offset + gap.nbytes == self._gaps[at].offset:
            behind = self._gaps.pop(at)
            gap = _Gap(gap.offset, gap.nbytes + behind.nbytes, _last((*gap.after, *behind.after)))
        if at > 0 and self._gaps[at - 1].offset + self._gaps[at - 1].nbytes == gap.offset:
            before = self._gaps.pop(at - 1)
            at -= 1
            gap = _Gap(before.offset, before.nbytes + gap.nbytes, _last((*before.after, *gap.after)))
        self._gaps.insert(at, gap)


def _last(tickets: tuple[Ticket, ...]) -> tuple[Ticket, ...]:
    """Those after which all of them are done; nobody is asked whether it is, since that takes a microsecond each."""
    last: list[Ticket] = []
    for ticket in tickets:
        if not any(other.covers(ticket) for other in last):
            last = [other for other in last if not ticket.covers(other)] + [ticket]
    return tuple(last)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
