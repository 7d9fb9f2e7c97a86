"""Makes megatron-core's checkpoint writer pass results within the process, and leave the garbage collector alone."""

import inspect
import queue
import weakref
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


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
