"""One slab of host memory, handed out by bytes, whatever the shapes are."""

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nemo_offload_rl.offload.activation_copies import Ticket

ALIGNMENT_BYTES = 4096
"""Regions start on pages, for copies at full speed."""


class Region(NamedTuple):
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


class _Gap(NamedTuple):
    start: int
    stop: int
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
        self.memory = memory
        self._gaps = [_Gap(0, self.nbytes, ())] if self.nbytes else []
        self._returned: deque[tuple[Region, Ticket | None]] = deque()

    def take(self, nbytes: int) -> Region | None:
        """A region of so many bytes; None if no gap is as large."""
        self._collect()
        return self._taken(nbytes)

    def _taken(self, nbytes: int) -> Region | None:
        wanted = _aligned(nbytes)
        for index, gap in enumerate(self._gaps):
            stop = gap.start + wanted
            if stop > gap.stop:
                continue
            if stop < gap.stop:
                self._gaps[index] = _Gap(stop, gap.stop, gap.after)
            else:
                del self._gaps[index]
            self.used_bytes += wanted
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return Region(gap.start, nbytes, gap.after)
        return None

    def take_all(self, sizes: Sequence[int]) -> list[Region] | None:
        """A region for each number of bytes; None, and nothing taken, if there is no room for all of them."""
        self._collect()
        regions: list[Region] = []
        for nbytes in sizes:
            region = self._taken(nbytes)
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
            _Gap(gap.start, gap.stop, tuple(ticket for ticket in gap.after if not ticket.reached()))
            for gap in self._gaps
        ]

    def give_back(self, region: Region, after: Ticket | None) -> None:
        """Return a region.

        Args:
            region: from `take`.
            after: the copy that uses it last, if it may still be under way; it follows those that the region names.
        """
        self._returned.append((region, after))

    def close(self) -> None:
        """Let go of the memory, whoever still knows this slab; there is no room in it any more."""
        self.nbytes = 0
        self.memory = self.memory[:0].clone()
        self._gaps = []
        self._returned.clear()

    def _collect(self) -> None:
        while self._returned:
            region, after = self._returned.popleft()
            reserved_bytes = region.reserved_bytes
            self.used_bytes -= reserved_bytes
            held = region.after if after is None else (after,)
            if reserved_bytes:
                self._insert(_Gap(region.offset, region.offset + reserved_bytes, held))

    def _insert(self, gap: _Gap) -> None:
        at = bisect(self._gaps, (gap.start,))  # no two begin at the same place
        if at < len(self._gaps) and gap.stop == self._gaps[at].start:
            behind = self._gaps.pop(at)
            gap = _Gap(gap.start, behind.stop, _last(gap.after, behind.after))
        if at > 0 and self._gaps[at - 1].stop == gap.start:
            before = self._gaps[at - 1]
            self._gaps[at - 1] = _Gap(before.start, gap.stop, _last(before.after, gap.after))
        else:
            self._gaps.insert(at, gap)


def _last(some: tuple[Ticket, ...], others: tuple[Ticket, ...]) -> tuple[Ticket, ...]:
    """Those after which all of them are done; nobody is asked whether it is, since that takes a microsecond each."""
    last = list(some)
    for ticket in others:
        if not any(known.covers(ticket) for known in last):
            last = [known for known in last if not ticket.covers(known)] + [ticket]
    return tuple(last)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
