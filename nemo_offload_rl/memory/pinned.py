"""Allocates page-locked host memory for offloaded state, near the GPU, in segments of whole pages with one owner each.

A segment is mapped, given a memory policy, touched by many threads, and page-locked chunk by chunk as its pages are
allocated; torch's `pin_memory=True` does all that on one thread and rounds up to a power of two. Without CUDA only the
page-locking is skipped.
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
"""Bytes that are page-locked in one call, while the next chunk is touched; drivers from R580 on refuse 512 GiB at once.

CUDA may refuse a copy that spans two locked ranges ("invalid argument"). Copies that are cut at multiples of this
number from the segment's start never do.
"""
_MAP_NORESERVE = 0x4000  # include/uapi/asm-generic/mman-common.h; the mmap module has no name for it


class HostMemoryError(MemoryError):
    """Raised when the host has less memory than a segment needs."""


class LeakError(RuntimeError):
    """Raised when a host segment was not released, or was released while tensors still view it."""


class HostSegment:
    """Holds zeroed host memory of one owner; made by `PinnedArena.allocate`.

    Attributes:
        owner: name of its user in logs and errors.
        nbytes: the requested size.
        mapped_bytes: the requested size, rounded up to whole pages.
        pinned: whether all of it is page-locked.
    """

    def __init__(self, owner: str, nbytes: int, mapping: mmap.mmap, locked: LockedRanges | None) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.mapped_bytes = len(mapping)
        self.pinned = locked is not None and locked.error is None
        self._mapping: mmap.mmap | None = mapping
        self._locked = locked
        # Tensors keep this view and it keeps the mapping, so no tensor can outlive its memory. With
        # torch.frombuffer(mapping) they could: torch releases that buffer at once.
        self._view: memoryview | None = memoryview(mapping)
        self._tensor: torch.Tensor | None = self.window(0, nbytes)

    @property
    def tensor(self) -> torch.Tensor:
        """Returns the segment's memory: uint8 [nbytes] on the CPU, starting on a page boundary.

        Cut copies between it and a GPU at multiples of `LOCK_CHUNK_BYTES`.
        """
        assert self._tensor is not None, f"the host segment of {self.owner} has been released"
        return self._tensor

    def window(self, offset: int, nbytes: int) -> torch.Tensor:
        """Returns a part of the segment, uint8 [nbytes], as a tensor with its own storage.

        `torch.save` writes the whole storage behind a view, and megatron-core's checkpoint writer copies it; the
        storage of this tensor holds only the part.
        """
        assert self._view is not None, f"the host segment of {self.owner} has been released"
        return torch.frombuffer(self._view, dtype=torch.uint8, count=nbytes, offset=offset)

    def _release(self) -> bool:
        """Unlocks the memory, and unmaps it unless a tensor still views it; returns whether it is unmapped.

        Otherwise it is unmapped with its last tensor. The caller makes sure that no copy is under way.
        """
        if self._locked is not None:
            self._locked.unlock()
        mapping, self._mapping, self._tensor, self._view = self._mapping, None, None, None
        assert mapping is not None
        with suppress(BufferError):
            mapping.close()
        return mapping.closed


class PinnedArena:
    """Allocates and releases host segments; not thread-safe.

    Args:
        numa_node: node that pages come from while it has free ones; None for the process's memory policy.
        huge_pages: whether to request transparent huge pages: several times faster to touch and to lock, with the same
            segment sizes.
        pin: False never page-locks. True and None do, with a `locker` or if CUDA is available.
        locker: page-locks the memory; None for `CudaPageLocker`.
        num_touch_threads: threads that touch new memory; None for one for each CPU that this process may use, up to 16.
        lock_chunk_bytes: bytes that are page-locked in one call, a multiple of the page size.
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
        # A range that is unmapped while locked stays pinned, and CUDA treats the next mapping at its address as locked.
        weakref.finalize(self, _unlock_all, self._segments).atexit = False

    @staticmethod
    def live_bytes() -> int:
        """Returns the bytes that this process's arenas have mapped now, with released segments that tensors still view.

        After a test in which nothing leaked it is 0.
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
        """Map, touch and page-lock a zeroed segment; pair it with `release`.

        If page-locking is refused, the segment is pageable, its `pinned` is False, and the first refusal is logged as a
        warning.

        Args:
            owner: name of the segment's user in logs and errors.
            nbytes: size of the segment; rounded up to whole pages, not further.
            pin: False leaves this segment pageable in an arena that page-locks others.

        Raises:
            ValueError: if `nbytes` is not positive.
            HostMemoryError: if the host does not have that much memory.
        """
        if nbytes <= 0:
            raise ValueError(
                f"{owner} requested a host segment of {nbytes} bytes; request at least 1 byte, or no segment."
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

        No copy may be under way, and no tensor may view it any more: a tensor that does stays valid and keeps the
        memory, which is no longer page-locked.

        Raises:
            ValueError: if the segment is not this arena's, or was released before.
            LeakError: if a tensor still views it.
        """
        if segment not in self._segments:
            raise ValueError(
                f"The host segment of {segment.owner} was not allocated by this arena, or was already released."
            )
        self._segments.remove(segment)
        if not segment._release():
            raise LeakError(
                f"Tensors still view the host segment of {segment.owner}, {segment.nbytes} bytes: drop them before "
                "`release`. Its memory is no longer page-locked and is freed with the last of them."
            )

    def close(self) -> None:
        """Release all segments that their owners did not release.

        Raises:
            LeakError: if there were any; the message names their owners.
        """
        left = self._release_all()
        if left:
            raise LeakError(
                f"These host segments were not released by their owners, and are released now: {_in_words(left)}."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the error explains why owners did not release theirs
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
            # At a fork, Linux copies every page-locked page for the child at once: that takes twice the memory, and
            # seconds. With this, a child that reads a pinned segment gets a fault, so it needs a copy made before.
            mapping.madvise(mmap.MADV_DONTFORK)

    def _ask_for_huge_pages(self, mapping: mmap.mmap) -> None:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            logger.warning(
                "This kernel has no transparent huge pages (%s); host segments use small pages.", error.strerror
            )

    def _warn_not_pinned(self, owner: str, size: int, locked: LockedRanges) -> None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        logger.log(
            logging.INFO if self._has_warned else logging.WARNING,
            "Page-locking failed for %s: %.2f GiB requested, %.2f GiB locked before the driver refused (%s), all "
            "unlocked again; RLIMIT_MEMLOCK is %s. Its copies go through a small staging buffer, which is slower.",
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
    """Cuts a segment's range into parts within one page-locked chunk each; returns the (begin, end) of each part."""
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
        f"Cannot allocate {nbytes} bytes of host memory ({nbytes / GIB:.2f} GiB) for {owner}; {available} bytes "
        f"({available / GIB:.2f} GiB) are available."
    )


def _unlock_all(segments: list[HostSegment]) -> None:
    for segment in segments:
        if segment._locked is not None:
            segment._locked.unlock()
