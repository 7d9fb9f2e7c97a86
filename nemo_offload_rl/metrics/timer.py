"""Measures the seconds of the phases of a step, and records traces, memory history and NVTX ranges of chosen steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class Timer:
    """Adds up the seconds spent in each phase since the last reset.

    A phase entered more than once is summed. Phases may nest; the outer one's seconds then include the inner one's, so
    do not nest phases whose seconds should add up to a total.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._around: Callable[[str], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block towards `name`, even if the block raises."""
        start = time.perf_counter()
        try:
            with self._around(name):
                yield
        finally:
            self.add(name, time.perf_counter() - start)

    @contextmanager
    def within(self, around: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
        """Runs the phases inside of the `with` block in contexts that `around` makes from their names."""
        self._around = around
        try:
            yield
        finally:
            self._around = nullcontext

    def add(self, name: str, seconds: float) -> None:
        """Counts seconds that were measured elsewhere towards `name`."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Returns phase -> seconds, in the order in which the phases first ended."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Forgets every phase."""
        self._seconds.clear()


logger = logging.getLogger(__name__)

# A snapshot holds the newest events; a step of a large model has some hundred thousand.
_MAX_MEMORY_EVENTS = 1_000_000


@dataclass(frozen=True)
class ProfileOptions:
    """Holds the recipe's section ``logger.profile``.

    Attributes:
        steps: the first and the last step to record.
        ranks: the ranks that record.
        trace: whether to write torch's trace.
        memory: whether to write snapshots of the memory of torch's CUDA allocator.
        nvtx: whether to mark phases by NVTX ranges.
    """

    steps: Sequence[int]
    ranks: Sequence[int]
    trace: bool
    memory: bool
    nvtx: bool


class Recording:
    """Records this process from its construction to `stop`.

    Args:
        prefix: path of the files to write, without their endings; its folder is made where it is missing.
        trace: as in `ProfileOptions`.
        memory: as in `ProfileOptions`.
        nvtx: as in `ProfileOptions`.
    """

    def __init__(self, prefix: Path, *, trace: bool, memory: bool, nvtx: bool) -> None:
        self._prefix = prefix
        self._memory = memory
        self._nvtx = nvtx
        self._trace: profile | None = None
        if trace:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._trace = profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True)
            self._trace.start()
        if memory:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Marks a part of the step; where it runs out of GPU memory, the snapshot is written at once."""
        with ExitStack() as stack:
            if self._trace is not None:
                stack.enter_context(record_function(name))
            if self._nvtx:
                stack.enter_context(torch.cuda.nvtx.range(name))
            try:
                yield
            except torch.OutOfMemoryError:
                self._dump_memory()
                raise

    def stop(self) -> None:
        """Ends the recording and writes its files; a file that cannot be written costs a warning, not the run."""
        self._dump_memory()
        if self._memory:
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._trace is not None:
            self._trace.stop()
            self._write(".json.gz", self._trace.export_chrome_trace)

    def _dump_memory(self) -> None:
        if self._memory:
            self._write("_memory.pickle", torch.cuda.memory._dump_snapshot)

    def _write(self, ending: str, write: Callable[[str], object]) -> None:
        path = self._prefix.with_name(f"{self._prefix.name}{ending}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
        except OSError as error:
            logger.warning("The profile %s cannot be written: %s.", path, error)
