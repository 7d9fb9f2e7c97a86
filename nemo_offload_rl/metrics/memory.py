"""Measures this process's host and GPU memory."""

from __future__ import annotations

import psutil

from nemo_offload_rl.memory.units import GIB


def memory_stats(gpu_bytes_beside_torch: int = 0, gpu_peak_bytes_beside_torch: int = 0) -> dict[str, float]:
    """Returns this process's memory in GiB.

    `host_rss_gib` is always there. `gpu_allocated_gib`, `gpu_reserved_gib` and their peaks since the last
    `reset_gpu_peak()` (`gpu_peak_allocated_gib`, `gpu_peak_reserved_gib`), of torch's allocator on the current device,
    are there once this process has used a GPU.

    Args:
        gpu_bytes_beside_torch: what this process holds of the GPU and torch's allocator does not know of; counted in.
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
    return stats


def reset_gpu_peak() -> None:
    """Starts a new measurement of the GPU peaks; does nothing where this process has not used a GPU."""
    if _gpu_is_in_use():
        import torch

        torch.cuda.reset_peak_memory_stats()


def _gpu_is_in_use() -> bool:
    import torch

    return torch.cuda.is_initialized()  # is_available() would have the questions below create a CUDA context
