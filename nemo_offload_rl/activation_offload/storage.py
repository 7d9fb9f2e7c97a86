"""Moves storages that autograd saved to regions of page-locked host memory and back."""

from bisect import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.activation_offload.copies import CopyEngine, CopyHandle, Span
from nemo_offload_rl.activation_offload.report import ModuleReport, Tally
from nemo_offload_rl.memory.errors import preserve_first_error
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


class SavedStorage:
    """Tracks a storage that autograd saved, on the GPU or on the host.

    Attributes:
        version: autograd's count of in-place changes of the tensor that was saved first.
        report: counts of the module that saved it first.
        path: names the copy engine and host memory that offloading it uses.
        nbytes: size of the storage.
        device: the GPU.
        storage: the storage on the GPU; None while it is on the host only.
        is_resident: whether it stays on the GPU; None until a group has committed it.
    """

    __slots__ = (
        "__weakref__",
        "_offloaded",
        "_prefetched",
        "_region",
        "_weak",
        "device",
        "is_resident",
        "nbytes",
        "path",
        "report",
        "storage",
        "version",
    )
    # Bound here: when `__del__` runs at interpreter exit, the torch module may have been cleared.
    _free_weak_ref = staticmethod(torch.UntypedStorage._free_weak_ref)

    def __init__(self, storage: torch.UntypedStorage, version: int, report: ModuleReport, path: OffloadPath) -> None:
        self.version = version
        self.report = report
        self.path = path
        self.nbytes = storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.is_resident: bool | None = None
        self.device = storage.device
        self._weak = storage._weak_ref()  # as torch.multiprocessing's StorageWeakRef; freed in `__del__`
        self._region: Region | None = None
        self._offloaded: CopyHandle | None = None
        self._prefetched: CopyHandle | None = None

    @property
    def was_offloaded(self) -> bool:
        """Tell whether its copy to the host was requested."""
        return self._offloaded is not None

    def span(self, storage: torch.UntypedStorage, region: Region) -> Span:
        """Pair a GPU storage of this storage's size with a host region of its path."""
        return Span(storage, self.path.host.memory, region.offset, self.nbytes)

    def set_offloaded(self, region: Region, handle: CopyHandle) -> None:
        """Records that its copy to the host was requested."""
        self._region, self._offloaded = region, handle

    def on_host(self) -> tuple[Region, CopyHandle]:
        """Returns its host region, and the handle of the copy into that region."""
        assert self._region is not None and self._offloaded is not None
        return self._region, self._offloaded

    def set_prefetched(self, storage: torch.UntypedStorage, handle: CopyHandle) -> None:
        """Records that its copy to the GPU was requested."""
        region, _ = self.on_host()
        self.storage, self._prefetched = storage, handle
        self._region = None
        if torch.UntypedStorage._new_with_weak_ptr(self._weak) is None:
            self.report.freed_bytes += self.nbytes  # otherwise a reference has kept its memory, which may have changed
        self.path.host.give_back(region, handle)

    def fetch(self) -> torch.UntypedStorage:
        """Returns its storage on the GPU, prefetched if necessary; the caller's stream waits for the copy."""
        if self.storage is None:
            prefetch([self])
        if self._prefetched is not None:
            self.path.copies.wait(self._prefetched)
            self._prefetched = None
        assert self.storage is not None
        return self.storage

    def __del__(self) -> None:
        self._free_weak_ref(self._weak)
        if self._prefetched is not None:  # prefetched and not needed
            self.path.copies.wait_to_free(self._prefetched)
        if self._region is not None:
            self.path.host.give_back(self._region, self._offloaded)


def offload(path: OffloadPath, placed: Sequence[tuple[SavedStorage, Region]]) -> CopyHandle:
    """Queue the copies of saved storages to their host regions, in one request: the CPU pays for each request."""
    spans: list[Span] = []
    after: list[CopyHandle] = []
    for stored, region in placed:
        assert stored.storage is not None
        spans.append(stored.span(stored.storage, region))
        after += region.after
    try:
        handle = path.copies.out(spans, after)
    except BaseException:
        with preserve_first_error():
            for _, region in placed:  # the next copy into a region follows those of this request, on one stream
                path.host.give_back(region, None)
            _end_copies(path)
        raise
    for stored, region in placed:
        stored.set_offloaded(region, handle)
    return handle


def _end_copies(path: OffloadPath) -> None:
    """Waits for copies of a refused request that may be under way, since their memory is about to be reused."""
    if not path.copies.is_capturing():  # the copies of a failed capture never run
        path.copies.synchronize()


def prefetch(storages: Sequence[SavedStorage]) -> None:
    """Request the copies to the GPU of saved storages that are on the host only and share a path, in one request."""
    if not storages:
        return
    spans: list[Span] = []
    after: list[CopyHandle] = []
    for stored in storages:
        region, offloaded = stored.on_host()
        spans.append(stored.span(torch.UntypedStorage(stored.nbytes, device=stored.device), region))
        after.append(offloaded)
    path = storages[0].path
    try:
        handle = path.copies.back(spans, after)
    except BaseException:
        with preserve_first_error():
            _end_copies(path)
        raise
    for stored, span in zip(storages, spans, strict=True):
        stored.set_prefetched(span.gpu, handle)


class ExcludedStorages:
    """Tracks the storages that are never offloaded: those of parameters, buffers and recomputed activations.

    Args:
        storages: those of parameters and buffers, excluded for as long as they live.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self.addresses = {storage._cdata for storage in storages}
        self._recomputed: list[StorageWeakRef] = []

    def add_recomputed(self, storage: torch.UntypedStorage) -> None:
        """Exclude a storage that selective recomputation empties, and fills again in the backward pass.

        It is emptied before a copy could be done, and recomputed into this same storage.
        """
        self.addresses.add(storage._cdata)
        self._recomputed.append(StorageWeakRef(storage))  # keeps its address from being reused until it is forgotten

    def forget_recomputed(self) -> None:
        """Forget recomputed storages after their passes have ended."""
        self.addresses.difference_update(ref.cdata for ref in self._recomputed)
        self._recomputed.clear()


class InPlaceError(RuntimeError):
    """Raised when a tensor was changed in place after it was saved, and before it was used or copied."""


ResidentTensor = tuple[torch.Tensor, int, str]
"""A tensor that stays on the GPU, its version when it was saved, and the module that saved it."""


def as_resident(tensor: torch.Tensor, module: str) -> ResidentTensor:
    """Returns what autograd stores for a tensor that stays on the GPU."""
    return without_history(tensor), tensor._version, module


def unpack_resident(resident: ResidentTensor) -> torch.Tensor:
    """Return the tensor after checking that it is unchanged: autograd itself checks versions only without hooks.

    Raises:
        InPlaceError: it has changed.
    """
    tensor, version, module = resident
    if tensor._version != version:
        raise InPlaceError(
            f"{changed_in_place(tensor, version, module)}, so gradients would be wrong; replace the in-place "
            "operation, which PyTorch refuses without offloading too, by one that makes a new tensor"
        )
    return tensor


def may_move(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor may be offloaded: it is not marked to stay, nor lazily conjugated or negated."""
    return not (
        tensor.is_conj()
        or tensor.is_neg()
        or getattr(tensor, "_TE_do_not_offload", False)
        or getattr(tensor, "_do_not_offload", False)
    )


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a non-leaf tensor: if saved with its history, the node that made it would keep itself alive."""
    return tensor if tensor.is_leaf else tensor.detach()


def changed_in_place(tensor: torch.Tensor, version: int, module: str) -> str:
    """Format the start of a message about a tensor that was changed after `module` had saved it at `version`."""
    return (
        f"a tensor of shape {list(tensor.shape)} that {module} saved for the backward pass was changed in place "
        f"(version {tensor._version}, saved at {version})"
    )
