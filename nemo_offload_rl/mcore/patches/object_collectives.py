"""Makes ranks exchange Python objects through host memory while a checkpoint is planned.

With NCCL, torch reads each object's size and bytes back from the GPU, after all queued copies to the host, on whichever
stream. On an H200 a checkpoint therefore took as long as its copies and its planning in sequence, though they were to
overlap (docs/results/async_save.md).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_COLLECTIVES = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")


def make_group() -> torch.distributed.ProcessGroup:
    """Create a group of all ranks whose collectives use host memory; collective."""
    return torch.distributed.new_group(backend="gloo", group_desc="checkpoint_objects")


@contextlib.contextmanager
def objects_through(group: torch.distributed.ProcessGroup) -> Iterator[None]:
    """Make object collectives without a group argument use a group of all ranks.

    This replaces torch's functions for all threads: only the calling thread may exchange objects meanwhile.

    Args:
        group: from `make_group`.
    """
    originals = {name: getattr(torch.distributed, name) for name in _COLLECTIVES}
    for name, collective in originals.items():
        setattr(torch.distributed, name, _with_default_group(collective, group))
    try:
        yield
    finally:
        for name, collective in originals.items():
            setattr(torch.distributed, name, collective)


def _with_default_group(collective: Callable[..., Any], default: torch.distributed.ProcessGroup) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*arguments: Any, group: torch.distributed.ProcessGroup | None = None, **named: Any) -> Any:
        return collective(*arguments, group=default if group is None else group, **named)

    return call
