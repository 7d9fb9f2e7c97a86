"""Measures this process's host and GPU memory, the latter also from NVML, the driver's library."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from nemo_offload_rl.memory.units import GIB


def process_gpu_bytes(nvml: Any = None, pid: int | None = None) -> int | None:
    """Returns this process's memory on torch's current GPU, as counted by the driver.

    Takes about a millisecond. In a container the driver may know processes by other ids, or not report them.

    Args:
        nvml: the module `pynvml`; imported if None.
        pid: id of another process to read instead.

    Returns:
        Bytes; None if the package or the driver is missing, or the driver does not report the process.
    """
    nvml = _pynvml() if nvml is None else nvml
    if nvml is None:
        return None
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(_handle(nvml))
    except nvml.NVMLError:
        return None
    own = os.getpid() if pid is None else pid
    found = [process.usedGpuMemory for process in running if process.pid == own]
    return int(found[0]) if found and found[0] is not None else None


@functools.cache
def _pynvml() -> Any:
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:  # it comes with the extra te
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _handle(nvml: Any) -> Any:
    import torch

    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")


def memory_stats(gpu_bytes_beside_torch: int = 0, gpu_peak_bytes_beside_torch: int = 0) -> dict[str, float]:
    """Returns this process's memory in GiB.

    `host_rss_gib` is always present. Once this process has used a GPU, so are torch's allocator counters of the current
    device, `gpu_allocated_gib` and `gpu_reserved_gib`, and their peaks since the last `reset_gpu_peak()`,
    `gpu_peak_allocated_gib` and `gpu_peak_reserved_gib`. If the driver reports it, `gpu_driver_gib` is all GPU memory
    of this process, and `gpu_context_gib` the part that is neither torch's nor in `gpu_bytes_beside_torch`: CUDA
    context, kernels, NCCL.

    Args:
        gpu_bytes_beside_torch: GPU memory that this process holds outside of torch's allocator; added to the counters.
            Negative for memory that torch's allocator still counts, but that was returned to the driver.
        gpu_peak_bytes_beside_torch: the same for the peaks.
    """
    stats = {"host_rss_gib": psutil.Process().memory_info().rss / GIB}
    if _gpu_is_in_use():
        import torch

        stats |= {
            "gpu_allocated_gib": (torch.cuda.memory_allocated() + gpu_bytes_beside_torch) / GIB,
            "gpu_reserved_gib": (torch.cuda.memory_reserved() + gpu_bytes_beside_torch) / GIB,
            "gpu_peak_allocated_gib": (torch.cuda.max_memory_allocated() + gpu_peak_bytes_beside_torch) / GIB,
            "gpu_peak_reserved_gib": (torch.cuda.max_memory_reserved() + gpu_peak_bytes_beside_torch) / GIB,
        }
        if (driver_bytes := process_gpu_bytes()) is not None:
            stats["gpu_driver_gib"] = driver_bytes / GIB
            stats["gpu_context_gib"] = stats["gpu_driver_gib"] - stats["gpu_reserved_gib"]
    return stats


@dataclass(frozen=True)
class GpuAllocated:
    """Counts the bytes that torch's allocator has allocated on the current device.

    Attributes:
        nbytes: bytes allocated now.
        peak_bytes: the most bytes since the last `reset_gpu_peak()`.
    """

    nbytes: int
    peak_bytes: int


def gpu_allocated() -> GpuAllocated | None:
    """Reads torch's allocator counters, not the driver's, which take a millisecond; None without a GPU in use."""
    if not _gpu_is_in_use():
        return None
    import torch

    return GpuAllocated(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())


def largest_of(every_process: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the largest value of each quantity over all processes; a process may lack some quantities."""
    largest: dict[str, float] = {}
    for stats in every_process:
        largest |= {name: max(value, largest.get(name, value)) for name, value in stats.items()}
    return largest


def graph_pool_bytes() -> int:
    """Returns the memory of torch's private pools, such as those of CUDA graphs and vLLM's; 0 without a GPU in use."""
    import torch

    if not _gpu_is_in_use():
        return 0
    segments = torch.cuda.memory_snapshot(include_traces=False)
    return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))


def reset_gpu_peak() -> None:
    """Starts a new measurement of the GPU peaks; does nothing where this process has not used a GPU."""
    if _gpu_is_in_use():
        import torch

        torch.cuda.reset_peak_memory_stats()


def _gpu_is_in_use() -> bool:
    import torch

    return torch.cuda.is_initialized()  # with is_available(), the reads above would create a CUDA context
