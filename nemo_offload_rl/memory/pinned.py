"""Gives host memory for offloaded state: exact to the page, near the GPU, page-locked, one owner a segment.

A segment is mapped, given a memory policy, touched by many threads and page-locked in chunks as its pages come; torch's
`pin_memory=True` does all that on one thread and rounds up to a power of two. Without CUDA the same path ends before
the page-locking.
"""

import errno
import logging
import mmap
import resource
import weakref
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import ClassVar, Self

import psutil
import torch

from nemo_offload_rl.memory.host_pages import (
    CudaPageLocker,
    LockedRanges,
    PageLocker,
    Touch,
    best_touch,
    default_num_threads,
    touching,
)
from nemo_offload_rl.memory.numa import prefer_node
from nemo_offload_rl.memory.units import GIB, round_up

logger = logging.getLogger(__name__)

LOCK_CHUNK_BYTES = GIB
"""What is page-locked at a time, while the next is touched; drivers from R580 on refuse 512 GiB in one piece.

CUDA may refuse a copy that reaches over two locked ranges ("invalid argument"). One that is cut at multiples of this
from the segment's start never does.
"""
_MAP_NORESERVE = 0x4000  # include/uapi/asm-generic/mman-common.h; the mmap module has no name for it


class HostMemoryError(MemoryError):
    """Says that the host has less memory than a segment asked for."""


class LeakError(RuntimeError):
    """Says that a host segment was not released, or was released while tensors still view it."""


class HostSegment:
    """Holds zeroed host memory of one owner; made by `PinnedArena.allocate`.

    Attributes:
        owner: what the memory is for, as logs and errors name it.
        nbytes: the size that was asked for.
        mapped_bytes: that size, rounded up to whole pages.
        pinned: whether all of it is page-locked.
    """

    def __init__(self, owner: str, nbytes: int, mapping: mmap.mmap, locked: LockedRanges | None) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.mapped_bytes = len(mapping)
        self.pinned = locked is not None and locked.error is None
        self._mapping: mmap.mmap | None = mapping
        self._locked = locked
        # Tensors keep this view and it keeps the mapping, so no tensor can outlive its memory. frombuffer(mapping)
        # would not do: torch gives the buffer back at once.
        self._view: memoryview | None = memoryview(mapping)
        self._tensor: torch.Tensor | None = self.window(0, nbytes)

    @property
    def tensor(self) -> torch.Tensor:
        """Returns all of its memory: uint8 [nbytes] on the CPU, its start on a page boundary.

        Between it and a GPU, cut copies at multiples of `LOCK_CHUNK_BYTES`.
        """
        assert self._tensor is not None, f"the host segment of {self.owner} has been released"
        return self._tensor

    def window(self, offset: int, nbytes: int) -> torch.Tensor:
        """Returns a part, uint8 [nbytes], as a tensor with a storage of its own.

        `torch.save` writes, and megatron-core's checkpoint writer copies, the whole storage behind a view; behind this
        one there is nothing but the part.
        """
        assert self._view is not None, f"the host segment of {self.owner} has been released"
        return torch.frombuffer(self._view, dtype=torch.uint8, count=nbytes, offset=offset)

    def _release(self) -> bool:
        """Unlocks, and unmaps unless a tensor still needs it: then the last one does. Returns whether it is unmapped.

        The caller sees to it that no copy is under way.
        """
        if self._locked is not None:
            self._locked.unlock()
        mapping, self._mapping, self._tensor, self._view = self._mapping, None, None, None
        assert mapping is not None
        with suppress(BufferError):
            mapping.close()
        return mapping.closed


class PinnedArena:
    """Allocates and releases segments; for one thread at a time.

    Args:
        numa_node: where pages should come from while that node has free ones; None leaves it to the process's policy.
        huge_pages: ask for transparent huge pages: several times faster to touch and to lock, and as exact.
        pin: False never page-locks. True and None do where they can: with a `locker`, or where CUDA is available.
        locker: how to page-lock; None for CUDA's way.
        num_touch_threads: how many threads touch new memory; None for as many as this process may use, up to 16.
        lock_chunk_bytes: how much is page-locked at a time, a multiple of the page size.
    """

    _mappings: ClassVar[weakref.WeakSet[mmap.mmap]] = weakref.WeakSet()

    def __init__(
        self,
        *,
        numa_node: int | None = None,
        huge_pages: bool = False,
        pin: bool | None = None,
        locker: PageLocker | None = None,
        num_touch_threads: int | None = None,
        lock_chunk_bytes: int = LOCK_CHUNK_BYTES,
    ) -> None:
        assert lock_chunk_bytes > 0 and lock_chunk_bytes % mmap.PAGESIZE == 0
        if locker is None and torch.cuda.is_available() and pin is not False:
            locker = CudaPageLocker()
        self._locker = None if pin is False else locker
        self._numa_node = numa_node
        self._huge_pages = huge_pages
        self._num_touch_threads = num_touch_threads
        self._lock_chunk_bytes = lock_chunk_bytes
        self._touch: Touch = best_touch()
        self._segments: list[HostSegment] = []
        self._has_warned = False
        # A range that is unmapped while locked stays pinned, and CUDA takes what is mapped there next for locked.
        weakref.finalize(self, _unlock_all, self._segments).atexit = False

    @staticmethod
    def live_bytes() -> int:
        """Returns the bytes that arenas of this process have mapped now, released segments that tensors hold included.

        0 after a test in which nothing leaked.
        """
        return sum(len(mapping) for mapping in PinnedArena._mappings if not mapping.closed)

    @property
    def allocated_bytes(self) -> int:
        """Returns the bytes of this arena's segments, in whole pages."""
        return sum(segment.mapped_bytes for segment in self._segments)

    @property
    def pinned_bytes(self) -> int:
        """Returns the page-locked part of `allocated_bytes`."""
        return sum(segment.mapped_bytes for segment in self._segments if segment.pinned)

    def allocate(self, owner: str, nbytes: int, *, pin: bool = True) -> HostSegment:
        """Map, touch and page-lock a segment, zeroed; pair it with `release`.

        Where page-locking is refused the segment is plain memory, `pinned` is False, and a warning says so, once.

        Args:
            owner: whom it is for.
            nbytes: its size; rounded up to whole pages, not further.
            pin: False leaves this segment pageable in an arena that page-locks others.

        Raises:
            ValueError: if `nbytes` is not positive.
            HostMemoryError: if the host has not that much.
        """
        if nbytes <= 0:
            raise ValueError(
                f"{owner} asked for a host segment of {nbytes} bytes; ask for at least one, or for none at all."
            )
        size = round_up(nbytes, mmap.PAGESIZE)
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, OverflowError) as error:
            raise _no_memory(owner, nbytes) from error
        locked = LockedRanges(self._locker) if self._locker is not None and pin else None
        with ExitStack() as undo:
            undo.callback(mapping.close)
            if locked is not None:
                undo.callback(locked.unlock)
            try:
                self._back_with_pages(mapping, locked)
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    raise _no_memory(owner, nbytes) from error
                raise
            undo.pop_all()
        PinnedArena._mappings.add(mapping)
        segment = HostSegment(owner, nbytes, mapping, locked)
        self._segments.append(segment)
        if locked is not None and locked.error is not None:
            self._warn_not_pinned(owner, size, locked)
        return segment

    def release(self, segment: HostSegment) -> None:
        """Unlock and unmap a segment.

        No copy may be under way, and no tensor may view it any more: one that does stays valid and keeps the memory,
        unlocked.

        Raises:
            ValueError: if the segment is not this arena's, or was released before.
            LeakError: if a tensor still views it.
        """
        if segment not in self._segments:
            raise ValueError(f"The host segment of {segment.owner} is not of this arena or was released before.")
        self._segments.remove(segment)
        if not segment._release():
            raise LeakError(
                f"Tensors still view the host segment of {segment.owner}, {segment.nbytes} bytes: drop them before "
                "`release`. Its memory is no longer page-locked and goes with the last of them."
            )

    def close(self) -> None:
        """Release what is left, which should be nothing.

        Raises:
            LeakError: if segments were left, with their owners.
        """
        left = self._release_all()
        if left:
            raise LeakError(f"Host segments that their owners did not release, released now: {_in_words(left)}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the error says why owners did not come to release theirs
            self._release_all()

    def _back_with_pages(self, mapping: mmap.mmap, locked: LockedRanges | None) -> None:
        address = _address_of(mapping)
        if self._huge_pages:
            self._ask_for_huge_pages(mapping)
        if self._numa_node is not None:
            prefer_node(address, len(mapping), self._numa_node)
        num_threads = self._num_touch_threads or default_num_threads()
        with touching(
            address, len(mapping), self._lock_chunk_bytes, num_threads=num_threads, touch=self._touch
        ) as chunks:
            for chunk in chunks:
                if locked is not None:
                    locked.add(*chunk)
        if locked is not None and locked.error is None:
            # At a fork Linux gives the child its own copy of every page-locked page at once: twice the memory, and
            # seconds. A child that reads a pinned segment gets a fault instead, so it needs a copy made before.
            mapping.madvise(mmap.MADV_DONTFORK)

    def _ask_for_huge_pages(self, mapping: mmap.mmap) -> None:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            logger.warning("This kernel has no transparent huge pages (%s): small ones are used.", error.strerror)

    def _warn_not_pinned(self, owner: str, size: int, locked: LockedRanges) -> None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        logger.log(
            logging.INFO if self._has_warned else logging.WARNING,
            "Page-locking failed for %s: %.2f GiB asked, %.2f GiB locked when it was refused (%s) and unlocked again; "
            "RLIMIT_MEMLOCK is %s. Its copies go through a small staging buffer, slower.",
            owner,
            size / GIB,
            locked.locked_bytes / GIB,
            locked.error,
            "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.3f} GiB",
        )
        self._has_warned = True

    def _release_all(self) -> list[HostSegment]:
        left = list(self._segments)
        self._segments.clear()
        for segment in left:
            segment._release()
        return left


def cut_at_locks(start: int, nbytes: int) -> list[tuple[int, int]]:
    """Yields begin and end of the parts of a segment's range that are page-locked in one piece each."""
    stop, cuts = start + nbytes, []
    while start < stop:
        end = min(stop, (start // LOCK_CHUNK_BYTES + 1) * LOCK_CHUNK_BYTES)
        cuts.append((start, end))
        start = end
    return cuts


def _address_of(mapping: mmap.mmap) -> int:
    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()


def _in_words(segments: Iterable[HostSegment]) -> str:
    return ", ".join(f"{segment.owner} ({segment.nbytes} bytes)" for segment in segments)


def _no_memory(owner: str, nbytes: int) -> HostMemoryError:
    available = psutil.virtual_memory().available
    return HostMemoryError(
        f"{owner} asked for {nbytes} bytes of host memory ({nbytes / GIB:.2f} GiB) and the host gave none; "
        f"{available} bytes ({available / GIB:.2f} GiB) are available."
    )


def _unlock_all(segments: list[HostSegment]) -> None:
    for segment in segments:
        if segment._locked is not None:
            segment._locked.unlock()
