"""Measures this process's host and GPU memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.gpu_process import process_gpu_bytes


def memory_stats(gpu_bytes_beside_torch: int = 0, gpu_peak_bytes_beside_torch: int = 0) -> dict[str, float]:
    """Returns this process's memory in GiB.

    `host_rss_gib` is always there. `gpu_allocated_gib`, `gpu_reserved_gib` and their peaks since the last
    `reset_gpu_peak()` (`gpu_peak_allocated_gib`, `gpu_peak_reserved_gib`), of torch's allocator on the current device,
    are there once this process has used a GPU; and where the driver tells, `gpu_driver_gib`, all that it counts for
    this process, and `gpu_context_gib`, what of it is neither torch's nor beside: CUDA context, kernels, NCCL.

    Args:
        gpu_bytes_beside_torch: what this process holds of the GPU and torch's allocator does not know of; counted in.
            Below 0 for what torch's allocator counts, and the driver has back.
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
    """Counts what torch's allocator has given out on the current device.

    Attributes:
        nbytes: now.
        peak_bytes: the most since the last `reset_gpu_peak()`.
    """

    nbytes: int
    peak_bytes: int


def gpu_allocated() -> GpuAllocated | None:
    """Reads torch's own counters, without the driver's, which take a millisecond; None without a GPU in use."""
    if not _gpu_is_in_use():
        return None
    import torch

    return GpuAllocated(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())


def largest_of(every_process: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns of each quantity the largest value of any process; one may lack what its driver does not tell."""
    largest: dict[str, float] = {}
    for stats in every_process:
        largest |= {name: max(value, largest.get(name, value)) for name, value in stats.items()}
    return largest


def graph_pool_bytes() -> int:
    """Returns the memory that torch's allocator keeps for CUDA graphs, and pools such as vLLM's; 0 without a GPU."""
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

    return torch.cuda.is_initialized()  # is_available() would have the questions below create a CUDA context
