"""Measures step times of several ways in turn, memory peaks, and the forward pass up to the logits."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from gpu_watch import GIB, GpuWatch
from megatron.core.models.gpt import GPTModel

from activation_cases.worker import MIB, release_memory
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

NUM_WARMUPS = 3


def in_turn(ways: Mapping[str, Callable[[], object]], num_steps: int) -> dict[str, list[float]]:
    """Returns the seconds of each way's steps, after warm-ups; each way goes first every other time."""
    for _ in range(NUM_WARMUPS):
        for way in ways.values():
            way()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with model_frozen():
        for step in range(num_steps):
            for name, way in list(ways.items())[:: 1 if step % 2 else -1]:
                torch.cuda.synchronize()
                start = time.perf_counter()
                way()
                torch.cuda.synchronize()
                taken[name].append(time.perf_counter() - start)
    return taken


@contextlib.contextmanager
def model_frozen() -> Iterator[None]:
    """Makes the garbage collector skip existing objects: 800,000 of them take 0.3 s in any way's step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class Peaks:
    """Holds peaks of GPU memory, in bytes.

    Attributes:
        allocated: by torch's allocator, ranges of the offloader not included.
        reserved: by torch's allocator, pools of graphs included.
        driver: all that the driver has given out, by its own count.
    """

    allocated: int
    reserved: int
    driver: int

    def cells(self) -> dict[str, int]:
        """Returns fields of a row; the peak without a name of its own is the driver's."""
        return {
            "peak_mib": round(self.driver / MIB),
            "allocated_peak_mib": round(self.allocated / MIB),
            "reserved_peak_mib": round(self.reserved / MIB),
            "driver_peak_mib": round(self.driver / MIB),
        }


def peaks_of(step: Callable[[], object]) -> Peaks:
    """Returns the peaks over two untimed steps, from an empty cache on; the driver is queried every 10 ms."""
    release_memory()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    grown_gib: dict[str, float] = {}
    with GpuWatch() as watch, watch.peak("steps", grown_gib):
        step()
        step()
        torch.cuda.synchronize()
    return Peaks(
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
        total - free + int(grown_gib["steps"] * GIB),
    )


def forward_seconds(worker: MegatronPolicyWorker, step: Callable[[], object]) -> float:
    """Returns the median GPU time from a micro-batch's start to its logits, over two steps.

    Copies have this much time: offloaded memory has to be free before the logits exist, or the peak is not lower.
    """
    begins: list[torch.cuda.Event] = []
    ends: list[torch.cuda.Event] = []

    def note(events: list[torch.cuda.Event]) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)

    [chunk] = worker.state.model
    [output_layer] = [module.output_layer for module in chunk.modules() if isinstance(module, GPTModel)]
    hooks = [
        chunk.register_forward_pre_hook(lambda *_: note(begins)),
        output_layer.register_forward_pre_hook(lambda *_: note(ends)),
    ]
    try:
        step()
        step()
    finally:
        for hook in hooks:
            hook.remove()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True))
