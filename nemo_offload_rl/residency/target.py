"""Defines the protocols that the offloader requires of a target and of its moves, and their errors."""

from typing import Protocol

import torch

from nemo_offload_rl.residency.table import Placement


class ResidencyError(RuntimeError):
    """Raised when a target could not move, or is not where it is needed; says which, why, and what to do."""


class NoRoomError(ResidencyError):
    """Raised when there was no memory for a target; all targets are where they were."""


class Move(Protocol):
    """Defines the handle of a target's move that has begun, to wait for it and to measure it."""

    nbytes: int
    """Bytes that cross the link; 0 for dropping and zeroing."""

    def wait(self) -> None:
        """Waits until the driver has the freed memory back, or until a target that comes back has its memory."""
        ...

    def wait_on_current_stream(self) -> None:
        """Makes later work of the current stream wait until the target is in place."""
        ...

    def copy_seconds(self) -> float:
        """Returns the seconds from the first byte on the link to the last."""
        ...

    def exposed_seconds(self) -> float:
        """Returns the seconds for which the caller, or its stream, waited."""
        ...

    @property
    def is_queued(self) -> bool:
        """Returns whether `wait` would return at once."""
        ...

    @property
    def has_failed(self) -> bool:
        """Returns whether `wait` would raise at once."""
        ...


class OffloadTarget(Protocol):
    """Defines the mechanism that moves a target."""

    @property
    def placements(self) -> frozenset[Placement]:
        """Returns the placements that this target can have."""
        ...

    @property
    def nbytes(self) -> int:
        """Returns the GPU memory that the target takes while it is on the GPU."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Returns the GPU memory that its ranges have mapped now."""
        ...

    @property
    def lazy_wait(self) -> bool:
        """Returns whether the target waits for its move before its first use, so that `enter` need not."""
        ...

    def start(self, placement: Placement) -> Move:
        """Begin the move to another placement; the last move must have ended.

        Raises:
            MemoryError: the host has no room; the target is where it was.
            torch.OutOfMemoryError: the GPU has none; likewise.
        """
        ...

    def name_for_error(self, error: Exception) -> str:
        """Returns the name of the tensor that an error of a move is about."""
        ...

    @property
    def needs_gpu_to_save(self) -> bool:
        """Returns whether saving a checkpoint computes with its tensors, and so needs them on the GPU."""
        ...

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns one of its tensors as a CPU tensor, while the target is on the host; None for another target's."""
        ...

    def close(self) -> None:
        """Free all memory."""
        ...
