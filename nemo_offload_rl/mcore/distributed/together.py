"""Raises one rank's disk error on all ranks, so that none waits for another and all can go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_offload_rl.storage.disk import disk_full, is_disk_full


def gather(value: Any) -> list[Any]:
    """Return every rank's value, in rank order, on every rank; collective."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def raise_together(errors: Sequence[OSError | None], path: Path, needed_bytes: int | None = None) -> None:
    """Raise the disk error of the first rank that has one; every rank with the same arguments raises the same.

    Args:
        errors: the error of each rank, in rank order; None for a rank without one.
        path: what the ranks wrote.
        needed_bytes: bytes of all that they wrote, if known.

    Raises:
        DiskFullError: that rank had no space.
        OSError: that rank had another error.
    """
    for rank, error in enumerate(errors):
        if error is None:
            continue
        if is_disk_full(error):
            raise disk_full(path, error, needed_bytes)
        raise OSError(error.errno, f"rank {rank} cannot write its part of {path}: {error.strerror}")
