"""Keeps a few tensors of an engine while their GPU memory is gone: in host memory, unless they are zeros."""

from collections.abc import Sequence

import torch


class SavedMemory:
    """Copies whole storages to host memory and back, to the same addresses; what is all zeros is zeroed instead.

    Args:
        tensors: Of the storages; several may share one. Each stays alive.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._on_device = [_bytes_of(tensor) for tensor in storages.values()]
        self._on_host: dict[int, torch.Tensor] = {}  # of those not zero at some save, by number; page-locked
        self._is_zero: list[bool] | None = None  # of each storage, while it is saved

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all storages."""
        return sum(storage.numel() for storage in self._on_device)

    @property
    def host_nbytes(self) -> int:
        """Returns the bytes of host memory, which stays from the first save at which a storage was not zero."""
        return sum(copy.numel() for copy in self._on_host.values())

    def save(self) -> None:
        """Copy what is not zero to host memory; it is there on return."""
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
        """Bring back what was saved, once; without a save before, nothing happens.

        It is there for what the current stream computes from now on, so that it comes beside the refit that follows. To
        wait for it took 24 ms of a switch of the 1.5 B model (docs/results/colocated.md), while zeros were copied, too.
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
    """Say of each storage whether all of its bits are zero, so that -0.0 is not; waits once for all answers."""
    if not storages:
        return []
    answers: list[bool] = torch.stack([_words_of(storage).any() for storage in storages]).logical_not().tolist()
    return answers


def _words_of(storage: torch.Tensor) -> torch.Tensor:
    """Its bytes as int64, eight at once, where size and address allow that."""
    size = torch.int64.itemsize
    return storage.view(torch.int64) if storage.numel() % size == storage.data_ptr() % size == 0 else storage


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
