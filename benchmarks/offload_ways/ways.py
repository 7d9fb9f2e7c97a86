"""Defines the ways that run in this process: tensor by tensor, one pinned buffer of torch's, and ours."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from nemo_offload_rl.memory.host_pages import PageLocker
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.flat_buffer import BufferEntry, FlatBuffer, FlatBufferTarget
from nemo_offload_rl.residency.optimizer_state import OptimizerState
from nemo_offload_rl.residency.table import Placement
from nemo_offload_rl.residency.transfer import Mover
from offload_ways.trips import settle

LINK_BLOCK_BYTES = 2**30


class Pageable:
    """Moves each tensor by itself through freshly allocated pageable memory, as upstream does."""

    name = "pageable"

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._tensors = list(tensors)
        self._device = device
        self.nbytes = sum(tensor.nbytes for tensor in tensors)

    def leave(self) -> None:
        """See `Way`."""
        for tensor in self._tensors:
            tensor.data = tensor.data.to("cpu", copy=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """See `Way`."""
        for tensor in self._tensors:
            tensor.data = tensor.data.to(self._device)

    def close(self) -> None:
        """See `Way`."""
        self._tensors = []


class TorchPinned:
    """Uses one buffer of torch's pinned memory and a copy for each tensor; resizes storages to nothing and back."""

    name = "torch_pinned"

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._tensors = list(tensors)
        self._device = device
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        self._parts = self._buffer.split([tensor.nbytes for tensor in tensors])

    def leave(self) -> None:
        """See `Way`."""
        for tensor, part in zip(self._tensors, self._parts, strict=True):
            part.copy_(_flat_bytes(tensor), non_blocking=True)
        settle(self._device)
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    def come_back(self) -> None:
        """See `Way`."""
        for tensor, part in zip(self._tensors, self._parts, strict=True):
            tensor.untyped_storage().resize_(tensor.nbytes)
            _flat_bytes(tensor).copy_(part, non_blocking=True)

    def close(self) -> None:
        """See `Way`."""
        self._tensors, self._parts = [], ()
        del self._buffer


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


class Ours:
    """Uses the engine: tensors live in a range and move as one."""

    name = "ours"

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device, locker: PageLocker | None = None) -> None:
        self.arena = PinnedArena(locker=locker)
        self.mover = Mover(device, self.arena)
        self.flat_buffer = FlatBuffer("benchmark", device, self.arena)
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._housed = self._house(tensors)
        settle(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # where the tensors lived before

    def _house(self, tensors: Sequence[torch.Tensor]) -> FlatBufferTarget:
        entries = [
            BufferEntry(str(number), tensor.untyped_storage(), [tensor]) for number, tensor in enumerate(tensors)
        ]
        self.flat_buffer.add(entries)
        return FlatBufferTarget(self.flat_buffer, self.mover)

    def leave(self) -> None:
        """See `Way`."""
        self._housed.start(Placement.HOST).wait()

    def come_back(self) -> None:
        """See `Way`."""
        self._housed.start(Placement.GPU).wait_on_current_stream()

    def copy_only(self, direction: str) -> None:
        """Makes the same copies without giving memory back or taking it: the cost of the link alone to other work."""
        if direction == "d2h":
            self.mover.save(self.flat_buffer.backed_ranges)
        else:
            self.mover.restore(self.flat_buffer.backed_ranges).wait_on_current_stream()

    def close(self) -> None:
        """See `Way`."""
        self.mover.close()
        self.flat_buffer.close()
        self.arena.close()


class OursForOptimizer(Ours):
    """Uses the engine's optimizer-state target, which looks for new state in every `leave`."""

    def __init__(
        self, optimizer: Any, model: Iterable[torch.nn.Module], tensors: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._optimizer = optimizer
        shared = {p.untyped_storage().data_ptr() for chunk in model for p in chunk.parameters()}
        self._shared = lambda: shared
        super().__init__(tensors, device)

    def _house(self, tensors: Sequence[torch.Tensor]) -> FlatBufferTarget:
        return OptimizerState(self._optimizer, self._shared, self.flat_buffer, self.mover)


def link_seconds_per_byte(device: torch.device, *, samples: int, copies: int = 4) -> dict[str, list[float]]:
    """Measures the link's limit: pinned blocks of 1 GiB, one direction at a time.

    Returns:
        Samples of seconds a byte, by direction (d2h, h2d).
    """
    there = torch.randint(0, 256, (LINK_BLOCK_BYTES,), dtype=torch.uint8, device=device)
    here = torch.empty(LINK_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
    found: dict[str, list[float]] = {"d2h": [], "h2d": []}
    for number in range(samples + 1):
        for direction, (destination, source) in {"d2h": (here, there), "h2d": (there, here)}.items():
            settle(device)
            start = time.perf_counter()
            for _ in range(copies):
                destination.copy_(source, non_blocking=True)
            settle(device)
            if number:  # the first warms up
                found[direction].append((time.perf_counter() - start) / (copies * LINK_BLOCK_BYTES))
    return found
