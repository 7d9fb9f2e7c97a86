"""Moves storages that autograd saved to the host and back, and tells which tensors stay on the GPU."""

from collections.abc import Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.activation_offload.copies import CopyHandle, Span
from nemo_offload_rl.activation_offload.host_pool import OffloadPath, Region
from nemo_offload_rl.activation_offload.report import ModuleReport
from nemo_offload_rl.memory.errors import preserve_first_error


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
