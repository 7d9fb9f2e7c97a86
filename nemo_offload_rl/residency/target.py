"""Defines what the engine asks of a target: the protocols of its mechanism and of its moves, and their errors."""

from typing import Protocol

import torch

from nemo_offload_rl.residency.table import Placement


class ResidencyError(RuntimeError):
    """Says that a target could not move, or is not where it is needed; and which, why, and what to do."""


class NoRoomError(ResidencyError):
    """Says that there was no memory for a target; everything is where it was."""


class Move(Protocol):
    """Defines the handle on a target's move that has begun, to wait for it and to measure it."""

    nbytes: int
    """Bytes that cross the link; dropping and zeroing cross nothing."""

    def wait(self) -> None:
        """Waits until the freed memory is the driver's, or until a target that comes back has its memory."""
        ...

    def wait_on_current_stream(self) -> None:
        """Makes later work of the current stream wait until the target is in place."""
        ...

    def copy_seconds(self) -> float:
        """Seconds from the first byte on the link to the last."""
        ...

    def exposed_seconds(self) -> float:
        """Seconds for which the caller, or its stream, waited."""
        ...

    @property
    def is_queued(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether `wait` would raise at once."""
        ...


class OffloadTarget(Protocol):
    """Defines the mechanism that moves a target."""

    @property
    def placements(self) -> frozenset[Placement]:
        """Returns the placements that this target can have."""
        ...

    @property
    def nbytes(self) -> int:
        """Returns the GPU memory that it takes while it is there."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Returns the GPU memory of its ranges now."""
        ...

    @property
    def lazy_wait(self) -> bool:
        """Whether the target waits for its move before its first use, so that `enter` need not."""
        ...

    def start(self, placement: Placement) -> Move:
        """Begin the move to a placement that it is not in; its last move has ended.

        Raises:
            MemoryError: the host has no room; the target is where it was.
            torch.OutOfMemoryError: the GPU has none; likewise.
        """
        ...

    def name_for_error(self, error: Exception) -> str:
        """The tensor that an error of a move is about."""
        ...

    @property
    def needs_gpu_to_save(self) -> bool:
        """Whether saving a checkpoint computes with its tensors and so needs them on the GPU."""
        ...

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """While it is on the host: a CPU tensor with the data of one of its tensors; None for another target's."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...
