"""Changes how checkpoints are written and planned, and how process groups end.

Makes ranks exchange Python objects through host memory while a checkpoint is planned. With NCCL, torch reads each
object's size and bytes back from the GPU, after all queued copies to the host, on whichever stream. On an H200 a
checkpoint therefore took as long as its copies and its planning in sequence, though they were to overlap
(docs/results/async_save.md).
"""

import contextlib
import functools
import inspect
import queue
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding


def pass_results_in_process() -> None:
    """Make the writer return its results through a queue within this process.

    megatron-core would start a process (4 s, and one more that may be left behind) to pass results to itself.
    """
    filesystem_async._results_queue = queue.Queue()


def leave_garbage_collector_alone() -> None:
    """Write files without the decorator that turns Python's garbage collector off, and on again at the end.

    The decorator affects the whole process: training would run without collections while files are written, and the
    end of the writing could turn them on during a graph capture, which needs them off.
    """
    writer = filesystem_async.FileSystemWriterAsync
    for name in ("write_preloaded_data_multithread", "write_preloaded_data"):
        setattr(writer, name, staticmethod(inspect.unwrap(getattr(writer, name))))


def wrap_finish(writer: Any, run: Callable[[Callable[[], None]], None]) -> None:
    """Make a writer's `finish` run inside `run`.

    The writer is held by a weak reference: one that references itself keeps the tensors it wrote until the next garbage
    collection, and they may be views of page-locked memory that is released before.
    """
    write_metadata = weakref.WeakMethod(writer.finish)
    writer.finish = lambda metadata, results: run(lambda: _alive(write_metadata)(metadata, results))


def _alive(method: weakref.WeakMethod[Callable[..., None]]) -> Callable[..., None]:
    found = method()
    assert found is not None, "megatron-core holds the writer until it has called its `finish`"
    return found


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


def clear_globals() -> None:
    """Clear globals that `destroy_model_parallel` leaves, which would keep process groups, the store and its port."""
    for name, value in vars(mpu).items():  # it leaves two
        if isinstance(value, torch.distributed.ProcessGroup):
            setattr(mpu, name, None)
    for rope in (RotaryEmbedding, YarnRotaryEmbedding):  # their caches hold the instances
        rope.forward.cache_clear()


def shut_down_groups_at_once() -> None:
    """Shut all groups of a single-rank run down in parallel, before `destroy_process_group`.

    NCCL takes 0.5 s to end a communicator, and torch ends one after the other. With several ranks torch's order is
    kept: some versions of NCCL end a communicator on all of its ranks together.
    """
    groups = list(torch.distributed.distributed_c10d._world.pg_names)
    with ThreadPoolExecutor(len(groups)) as threads:
        list(threads.map(lambda group: group.shutdown(), groups))
