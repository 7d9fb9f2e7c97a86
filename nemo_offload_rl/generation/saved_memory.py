"""Saves a few tensors of an engine to host memory, unless they are zeros, while their GPU memory is freed."""

from collections.abc import Sequence

import torch


class SavedMemory:
    """Copies whole storages to host memory and back, to the same addresses; all-zero storages are zeroed instead.

    Args:
        tensors: Tensors of these storages, of which several may share one. Each is kept alive.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._on_device = [_bytes_of(tensor) for tensor in storages.values()]
        self._on_host: dict[int, torch.Tensor] = {}  # pinned, by index: storages that some save found not to be zero
        self._is_zero: list[bool] | None = None  # for each storage, while it is saved

    @property
    def nbytes(self) -> int:
        """Returns the size of all storages in bytes."""
        return sum(storage.numel() for storage in self._on_device)

    @property
    def host_nbytes(self) -> int:
        """Returns the bytes of host memory, which is kept once a save found a storage that is not zero."""
        return sum(copy.numel() for copy in self._on_host.values())

    def save(self) -> None:
        """Copies storages that are not zero to host memory, and waits for the copies."""
        are_zero = _are_zero(self._on_device)
        for number, (storage, is_zero) in enumerate(zip(self._on_device, are_zero, strict=True)):
            if not is_zero:
                if number not in self._on_host:
                    self._on_host[number] = torch.empty_like(storage, device="cpu", pin_memory=storage.is_cuda)
                self._on_host[number].copy_(storage, non_blocking=True)
        if not all(are_zero) and self._on_device[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        self._is_zero = are_zero

    def restore(self) -> None:
        """Restores the saved storages once; without a save before, nothing happens.

        The copies are ordered on the current stream but not waited for, so that they overlap with the refit that
        follows. Waiting took 24 ms of a switch of the 1.5 B model (docs/results/colocated.md), when zeros were still
        copied, too.
        """
        if self._is_zero is None:
            return
        for number, (storage, is_zero) in enumerate(zip(self._on_device, self._is_zero, strict=True)):
            if is_zero:
                storage.zero_()
            else:
                storage.copy_(self._on_host[number], non_blocking=True)
        self._is_zero = None


def _are_zero(storages: Sequence[torch.Tensor]) -> list[bool]:
    """Returns for each storage whether all of its bits are zero, which excludes -0.0.

    It synchronizes with the GPU once for all storages.
    """
    if not storages:
        return []
    answers: list[bool] = torch.stack([_words_of(storage).any() for storage in storages]).logical_not().tolist()
    return answers


def _words_of(storage: torch.Tensor) -> torch.Tensor:
    """Returns a storage as int64, eight bytes per element, if its size and address allow it, otherwise as bytes."""
    size = torch.int64.itemsize
    return storage.view(torch.int64) if storage.numel() % size == storage.data_ptr() % size == 0 else storage


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the tensor's whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
