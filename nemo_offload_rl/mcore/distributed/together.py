"""Raises an error of one rank's disk on all ranks, so that none waits for another and all can go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_offload_rl.storage.disk import disk_full, is_disk_full


def gather(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank; collective."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def raise_together(errors: Sequence[OSError | None], path: Path, needed_bytes: int | None = None) -> None:
    """Raise what ranks have met when they wrote to the disk; the same on every rank that is given the same.

    Args:
        errors: of each rank, in rank order; None for one that met none.
        path: what they wrote.
        needed_bytes: what all of it takes, where that is known.

    Raises:
        DiskFullError: there is no space for one of them.
        OSError: one of them had another error.
    """
    for rank, error in enumerate(errors):
        if error is None:
            continue
        if is_disk_full(error):
            raise disk_full(path, error, needed_bytes)
        raise OSError(error.errno, f"rank {rank} cannot write its part of {path}: {error.strerror}")
