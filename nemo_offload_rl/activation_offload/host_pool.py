"""Allocates regions of page-locked host memory by number of bytes, independent of tensor shapes."""

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from nemo_offload_rl.activation_offload.copies import CopyEngine, CopyHandle
from nemo_offload_rl.activation_offload.report import Tally
from nemo_offload_rl.memory.units import round_up

ALIGNMENT_BYTES = 4096
"""Regions start on page boundaries, for copies at full speed."""


class Region(NamedTuple):
    """Describes the part of a host pool that is allocated to one storage.

    Attributes:
        offset: where its first byte is in the pool.
        reserved_bytes: the requested bytes, padded to whole pages.
        after: earlier copies that use this part, which the next copy into it has to follow.
    """

    offset: int
    reserved_bytes: int
    after: tuple[CopyHandle, ...]


class HostRegions(Protocol):
    """Defines an allocator of host memory regions, such as `PinnedHostPool`."""

    @property
    def memory(self) -> torch.Tensor:
        """Returns all of its memory: uint8 [nbytes]."""
        ...

    def take_all(self, sizes: Sequence[int]) -> list[Region] | None:
        """Take a region for each number of bytes; returns None, and takes nothing, if they do not all fit."""
        ...

    def give_back(self, region: Region, after: CopyHandle | None) -> None:
        """Return a region; `after` is the last copy that uses it, if it may still be under way."""
        ...


@dataclass
class OffloadPath:
    """Bundles the host memory, copy engine and byte counts of eager passes, or of passes captured in CUDA graphs."""

    host: HostRegions
    copies: CopyEngine
    tally: Tally = field(default_factory=Tally)


class _Gap(NamedTuple):
    start: int
    stop: int
    after: tuple[CopyHandle, ...]


class PinnedHostPool:
    """Allocates regions of page-locked host memory, first fit, and merges regions that are given back.

    Regions may be given back from any thread and at any time, also by the garbage collector while a region is being
    taken: they are queued, and the next `take_all` frees them.

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
        self._returned: deque[tuple[Region, CopyHandle | None]] = deque()

    def _take_first_fit(self, reserved_bytes: int) -> Region | None:
        for index, gap in enumerate(self._gaps):
            stop = gap.start + reserved_bytes
            if stop > gap.stop:
                continue
            if stop < gap.stop:
                self._gaps[index] = _Gap(stop, gap.stop, gap.after)
            else:
                del self._gaps[index]
            self.used_bytes += reserved_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return Region(gap.start, reserved_bytes, gap.after)
        return None

    def take_all(self, sizes: Sequence[int]) -> list[Region] | None:
        """Take a region for each number of bytes, side by side if one gap holds all of them.

        Returns:
            The regions, in order; None, with nothing taken, if there is no room for all of them.
        """
        self._collect()
        reserved = [round_up(nbytes, ALIGNMENT_BYTES) for nbytes in sizes]
        whole = self._take_first_fit(sum(reserved))
        if whole is not None:  # one search for all
            offsets = accumulate(reserved, initial=whole.offset)
            return [Region(offset, nbytes, whole.after) for offset, nbytes in zip(offsets, reserved, strict=False)]
        regions: list[Region] = []
        for nbytes in reserved:
            region = self._take_first_fit(nbytes)
            if region is None:
                for taken in regions:
                    self.give_back(taken, None)
                return None
            regions.append(region)
        return regions

    def forget_reached(self) -> None:
        """Forget copies that are done, so that free regions do not name them; on an idle GPU that is all copies."""
        self._collect()
        self._gaps = [
            _Gap(gap.start, gap.stop, tuple(handle for handle in gap.after if not handle.reached()))
            for gap in self._gaps
        ]

    def give_back(self, region: Region, after: CopyHandle | None) -> None:
        """Return a region.

        Args:
            region: from `take_all`.
            after: the last copy that uses it, if it may still be under way; it follows those in `region.after`.
        """
        self._returned.append((region, after))

    def close(self) -> None:
        """Free the memory, even if references to this host pool remain; later requests find no room."""
        self.nbytes = 0
        self.memory = self.memory[:0].clone()
        self._gaps = []
        self._returned.clear()

    def _collect(self) -> None:
        gap: _Gap | None = None
        while self._returned:
            (start, reserved_bytes, after), last = self._returned.popleft()
            if not reserved_bytes:
                continue
            self.used_bytes -= reserved_bytes
            if not self.nbytes:  # closed
                continue
            stop = start + reserved_bytes
            if last is not None:
                after = (last,)
            # Regions that were taken side by side come back side by side, and are inserted as one gap.
            if gap is not None and gap.after == after and start == gap.stop:
                gap = _Gap(gap.start, stop, after)
            elif gap is not None and gap.after == after and stop == gap.start:
                gap = _Gap(start, gap.stop, after)
            else:
                if gap is not None:
                    self._insert(gap)
                gap = _Gap(start, stop, after)
        if gap is not None:
            self._insert(gap)

    def _insert(self, gap: _Gap) -> None:
        at = bisect(self._gaps, (gap.start,))  # no two gaps begin at the same offset
        if at < len(self._gaps) and gap.stop == self._gaps[at].start:
            behind = self._gaps.pop(at)
            gap = _Gap(gap.start, behind.stop, _last(gap.after, behind.after))
        if at > 0 and self._gaps[at - 1].stop == gap.start:
            before = self._gaps[at - 1]
            self._gaps[at - 1] = _Gap(before.start, gap.stop, _last(before.after, gap.after))
        else:
            self._gaps.insert(at, gap)


def _last(some: tuple[CopyHandle, ...], others: tuple[CopyHandle, ...]) -> tuple[CopyHandle, ...]:
    """Merges handles, without those that others cover; asking each whether it is done would take a microsecond."""
    last = list(some)
    for handle in others:
        if not any(known.covers(handle) for known in last):
            last = [known for known in last if not handle.covers(known)] + [handle]
    return tuple(last)
