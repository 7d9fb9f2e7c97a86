"""A storage that autograd saved, on its way to the host and back."""

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.offload.activation_copies import Ticket
from nemo_offload_rl.offload.activation_route import Route
from nemo_offload_rl.offload.host_slab import Region


class InPlaceError(RuntimeError):
    """Something changed a saved tensor while it was copied."""


class Parcel:
    """A storage that autograd saved, wherever it is now.

    Attributes:
        module: that saved it first.
        route: that it takes.
        nbytes: of the storage.
        storage: on the GPU; None while it is on the host alone.
        is_settled: a group has committed it: it leaves, or it stays.
    """

    def __init__(self, storage: torch.UntypedStorage, module: str, route: Route) -> None:
        self.module = module
        self.route = route
        self.nbytes = storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.is_settled = False
        self._device = storage.device
        self._weak = StorageWeakRef(storage)
        self._region: Region | None = None
        self._left: Ticket | None = None
        self._returning: Ticket | None = None

    @property
    def has_left(self) -> bool:
        """Whether a copy out of it was asked for."""
        return self._left is not None

    def leave(self, region: Region, ticket: Ticket) -> None:
        """Its copy to the host was asked for."""
        self._region, self._left = region, ticket

    def is_gone(self) -> bool:
        """Whether its memory on the GPU is."""
        return self.storage is None and self._weak.expired()

    def start_back(self) -> int:
        """Ask for the copy to the GPU, unless it is there.

        Returns:
            Bytes that will be copied.
        """
        if self.storage is not None:
            return 0
        alive = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if alive is not None and alive.nbytes() == self.nbytes:  # somebody else has kept it
            self.storage = alive
            return 0
        assert self._region is not None and self._left is not None
        self.storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device).untyped_storage()
        there = as_bytes(self.storage)
        pairs = [(there[offset : offset + len(piece)], piece) for offset, piece in self.route.host.pieces(self._region)]
        self._returning = self.route.copies.back(pairs, [self._left])
        self.route.host.give_back(self._region, self._returning)
        self._region = None
        return self.nbytes

    def fetch(self) -> torch.UntypedStorage:
        """Its storage on the GPU; the caller's stream has waited for it."""
        self.start_back()
        if self._returning is not None:
            self.route.copies.wait(self._returning)
            self._returning = None
        assert self.storage is not None
        return self.storage

    def __del__(self) -> None:
        if self._returning is not None:  # prefetched and not needed: its memory must not be used again before
            self.route.copies.wait(self._returning)
        if self._region is not None:
            self.route.host.give_back(self._region, self._left)


@dataclass(frozen=True)
class SavedView:
    """What autograd keeps instead of a tensor: how to see it in its storage again."""

    parcel: Parcel
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """The tensor, on the GPU."""
        storage = self.parcel.fetch()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor, uint8 [nbytes]."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)


def check_version(tensor: torch.Tensor, version: int, module: str) -> None:
    """Refuse to go on with a copy of something that has changed since.

    Raises:
        InPlaceError: it has; autograd itself would refuse its backward pass.
    """
    if tensor._version != version:
        raise InPlaceError(
            f"a tensor of shape {list(tensor.shape)} that {module} saved for the backward pass was changed in place "
            f"(version {tensor._version}, saved at {version}) while it was copied to the host; take {module} out of "
            "policy.megatron_cfg.offload_modules"
        )
