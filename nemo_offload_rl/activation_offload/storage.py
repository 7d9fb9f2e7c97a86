"""Moves storages that autograd saved to the host and back, and tells which tensors stay on the GPU."""

from collections.abc import Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.activation_offload.copies import CopyHandle, Span
from nemo_offload_rl.activation_offload.host_pool import OffloadPath, Region
from nemo_offload_rl.activation_offload.report import ModuleReport
from nemo_offload_rl.memory.errors import preserve_first_error


class SavedStorage:
    """Follows a storage that autograd saved, wherever it is now.

    Attributes:
        version: of the tensor that was saved first, in autograd's count of changes in place.
        report: of the module that saved it first.
        path: names the copy engine and host memory that offloading it uses.
        nbytes: of the storage.
        device: the GPU.
        storage: on the GPU; None while it is on the host alone.
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
    # Not by torch's name when it is called: an interpreter that ends may have cleared that module.
    _free_weak_ref = staticmethod(torch.UntypedStorage._free_weak_ref)

    def __init__(self, storage: torch.UntypedStorage, version: int, report: ModuleReport, path: OffloadPath) -> None:
        self.version = version
        self.report = report
        self.path = path
        self.nbytes = storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.is_resident: bool | None = None
        self.device = storage.device
        self._weak = storage._weak_ref()  # as torch.multiprocessing's StorageWeakRef; given back in `__del__`
        self._region: Region | None = None
        self._offloaded: CopyHandle | None = None
        self._prefetched: CopyHandle | None = None

    @property
    def was_offloaded(self) -> bool:
        """Tell whether its copy to the host was requested."""
        return self._offloaded is not None

    def span(self, storage: torch.UntypedStorage, region: Region) -> Span:
        """Pair `storage` on the GPU, as large as its own, with a region of its path."""
        return Span(storage, self.path.host.memory, region.offset, self.nbytes)

    def set_offloaded(self, region: Region, handle: CopyHandle) -> None:
        """Notes that its copy to the host was requested."""
        self._region, self._offloaded = region, handle

    def on_host(self) -> tuple[Region, CopyHandle]:
        """Returns its place on the host, and the copy that has taken it there."""
        assert self._region is not None and self._offloaded is not None
        return self._region, self._offloaded

    def set_prefetched(self, storage: torch.UntypedStorage, handle: CopyHandle) -> None:
        """Notes that its copy to the GPU was requested."""
        region, _ = self.on_host()
        self.storage, self._prefetched = storage, handle
        self._region = None
        if torch.UntypedStorage._new_with_weak_ptr(self._weak) is None:
            self.report.freed_bytes += self.nbytes  # otherwise a reference has kept its memory, which may have changed
        self.path.host.give_back(region, handle)

    def fetch(self) -> torch.UntypedStorage:
        """Returns its storage on the GPU; the caller's stream has waited for it."""
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
            for _, region in placed:  # the next copy there comes after those of this request, on the same stream
                path.host.give_back(region, None)
            _end_copies(path)
        raise
    for stored, region in placed:
        stored.set_offloaded(region, handle)
    return handle


def _end_copies(path: OffloadPath) -> None:
    """Waits for copies of a refused request that may be under way, in memory about to be used again."""
    if not path.copies.is_capturing():  # what a capture has asked for never runs where it fails
        path.copies.synchronize()


def prefetch(storages: Sequence[SavedStorage]) -> None:
    """Request the copies to the GPU of saved storages that are on the host alone and take one path, all at once."""
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
    """Tracks the storages that are never offloaded: of parameters, buffers and recomputed activations.

    Args:
        storages: of parameters and buffers, for as long as they live.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self.addresses = {storage._cdata for storage in storages}
        self._recomputed: list[StorageWeakRef] = []

    def add_recomputed(self, storage: torch.UntypedStorage) -> None:
        """Exclude a storage that selective recomputation empties, and fills again in the backward pass.

        Its bytes go before a copy could be through, and those that come back do so in this storage.
        """
        self.addresses.add(storage._cdata)
        self._recomputed.append(StorageWeakRef(storage))  # until it is forgotten no other one has this address

    def forget_recomputed(self) -> None:
        """Forget recomputed storages, whose passes have ended."""
        self.addresses.difference_update(ref.cdata for ref in self._recomputed)
        self._recomputed.clear()


class InPlaceError(RuntimeError):
    """Reports that a tensor was changed between its saving and its use, or its copy."""


ResidentTensor = tuple[torch.Tensor, int, str]
"""A tensor that stays on the GPU, its version when it was saved, and the module that saved it."""


def as_resident(tensor: torch.Tensor, module: str) -> ResidentTensor:
    """Returns what autograd keeps of a tensor that stays."""
    return without_history(tensor), tensor._version, module


def unpack_resident(resident: ResidentTensor) -> torch.Tensor:
    """Return the tensor, as it was saved: autograd asks for versions only where there are no hooks.

    Raises:
        InPlaceError: it has changed.
    """
    tensor, version, module = resident
    if tensor._version != version:
        raise InPlaceError(
            f"{changed_in_place(tensor, version, module)}, and gradients would be wrong, as they would without "
            "offloading; let what changes it make a new tensor"
        )
    return tensor


def may_move(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is not marked to stay, and its bytes are its values (neither conjugated nor negated)."""
    return not (
        tensor.is_conj()
        or tensor.is_neg()
        or getattr(tensor, "_TE_do_not_offload", False)
        or getattr(tensor, "_do_not_offload", False)
    )


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """Detach an output: with its history, the node that made it would hold itself alive."""
    return tensor if tensor.is_leaf else tensor.detach()


def changed_in_place(tensor: torch.Tensor, version: int, module: str) -> str:
    """Begin a message about a tensor that was changed after `module` had saved it at `version`."""
    return (
        f"a tensor of shape {list(tensor.shape)} that {module} saved for the backward pass was changed in place "
        f"(version {tensor._version}, saved at {version})"
    )
