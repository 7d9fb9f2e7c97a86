"""Copies what a checkpoint will hold into host memory, where no later step can change it."""

from collections.abc import Container, Sequence
from typing import Any

import torch

from nemo_offload_rl.memory.pinned import HostSegment, PinnedArena, cut_at_locks
from nemo_offload_rl.memory.units import round_up

# A file of a rank: its path, its name, and what goes into it: (item, bytes) and (item, tensor) pairs.
Bucket = tuple[Any, str, tuple[list[Any], list[tuple[Any, torch.Tensor]]]]
_ALIGNMENT = 256


class HostSnapshot:
    """Copies tensors of a checkpoint into host memory, page-locked where there is a GPU; reuses it for the next one.

    Args:
        arena: gives the memory, at the first snapshot and when one is larger than those before.
    """

    def __init__(self, arena: PinnedArena) -> None:
        self._arena = arena
        self._segment: HostSegment | None = None

    def take(self, buckets: Sequence[Bucket], lent: Container[int]) -> list[Bucket]:
        """Returns the buckets with tensors whose contents stay.

        Tensors of the snapshot before must have been dropped.

        Args:
            buckets: with tensors of a GPU or of the host.
            lent: addresses of host tensors whose contents stay anyway: they are taken as they are.

        Raises:
            HostMemoryError: the host has no room for the copies.
        """
        tensors = [tensor for _, _, (_, pairs) in buckets for _, tensor in pairs if tensor.data_ptr() not in lent]
        sizes = [round_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors]
        self._reserve(sum(sizes))
        copies: dict[int, torch.Tensor] = {}
        offset = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            copies[id(tensor)] = self._copy(tensor, offset)
            offset += size
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.current_stream().synchronize()
        return [
            (path, name, (raw, [(item, copies.get(id(tensor), tensor)) for item, tensor in pairs]))
            for path, name, (raw, pairs) in buckets
        ]

    def _reserve(self, nbytes: int) -> None:
        if nbytes and (self._segment is None or self._segment.nbytes < nbytes):
            self.close()
            self._segment = self._arena.allocate("checkpoints", nbytes)

    def _copy(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        if tensor.nbytes == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        assert self._segment is not None
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for begin, end in cut_at_locks(offset, tensor.nbytes):
            part = source[begin - offset : end - offset]
            self._segment.tensor[begin:end].copy_(part, non_blocking=self._segment.pinned)
        # With a storage of its own: torch.save writes the whole storage behind a view.
        return self._segment.window(offset, tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def close(self) -> None:
        """Gives the memory back."""
        if self._segment is not None:
            segment, self._segment = self._segment, None
            self._arena.release(segment)
