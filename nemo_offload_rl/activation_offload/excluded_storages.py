"""Storages that autograd saves in modules whose activations leave, and that stay on the GPU all the same."""

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class ExcludedStorages:
    """Those that never leave.

    Args:
        storages: of parameters and buffers, for as long as they live.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self.addresses = {storage._cdata for storage in storages}
        self._recomputed: list[StorageWeakRef] = []

    def add_recomputed(self, storage: torch.UntypedStorage) -> None:
        """Keep what selective recomputation is going to empty, and to fill again in the backward pass.

        Its bytes go before a copy could be through, and those that come back do so in this storage.
        """
        self.addresses.add(storage._cdata)
        self._recomputed.append(StorageWeakRef(storage))  # until it is forgotten no other one has this address

    def forget_recomputed(self) -> None:
        """Their passes have ended."""
        self.addresses.difference_update(ref.cdata for ref in self._recomputed)
        self._recomputed.clear()
