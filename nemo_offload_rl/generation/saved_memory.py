"""Keeps a few tensors of an engine in host memory while their GPU memory is gone."""

from collections.abc import Sequence

import torch


class SavedMemory:
    """Copies whole storages to host memory and back, to the same addresses.

    Args:
        tensors: Of the storages; several may share one. Each stays alive.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._on_device = [_bytes_of(tensor) for tensor in storages.values()]
        self._on_host: list[torch.Tensor] = []  # from the first save on; page-locked beside a GPU
        self._is_saved = False

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all storages."""
        return sum(storage.numel() for storage in self._on_device)

    def save(self) -> None:
        """Copy to host memory; it is there on return."""
        if not self._on_host:
            self._on_host = [torch.empty_like(each, device="cpu", pin_memory=each.is_cuda) for each in self._on_device]
        _copy(self._on_device, self._on_host)
        if self._on_device and self._on_device[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        self._is_saved = True

    def restore(self) -> None:
        """Copy back what was saved, once; without a save before, nothing happens.

        It is there for what the current stream computes from now on. To wait for it took 24 ms of a switch of the 1.5 B
        model (docs/results/colocated.md); now it comes beside the refit that follows.
        """
        if self._is_saved:
            _copy(self._on_host, self._on_device)
        self._is_saved = False


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
