"""Measures a GPU's link to host memory with page-locked memory, and computes its limit."""

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_offload_rl.memory.units import GIB

if TYPE_CHECKING:
    import torch

    from nemo_offload_rl.memory.pinned import PinnedArena

# PCI Express: GB/s of a lane in one direction after line coding (8b/10b, 128b/130b, flits from 6 on), before headers.
_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}

# A virtual machine may get its memory only when it first touches it: on an H200's, 1.6 GB/s then and 5.3 GB/s later.
_PAGE_LOCKINGS = 3


class LinkNotMeasuredError(RuntimeError):
    """Says why the link cannot be measured here."""


@dataclass(frozen=True)
class LinkBenchmark:
    """Holds measured speeds, GB/s (1e9 bytes): medians of copies of one block between page-locked memory and a GPU.

    Attributes:
        d2h_gb_per_s: From the GPU to the host, alone.
        h2d_gb_per_s: From the host to the GPU, alone.
        both_gb_per_s: Both directions at once, added up.
        page_lock_gb_per_s: Host memory of the block's size made usable: mapped, touched and page-locked.
    """

    d2h_gb_per_s: float
    h2d_gb_per_s: float
    both_gb_per_s: float
    page_lock_gb_per_s: float


def pcie_gb_per_s(generation: int | None, width: int | None) -> float | None:
    """Returns the limit of a PCI Express link in one direction, GB/s; None for an unknown link."""
    if generation is None or width is None or generation not in _LANE_GB_PER_S:
        return None
    return _LANE_GB_PER_S[generation] * width


def benchmark_link(
    device: int, *, numa_node: int | None = None, block_bytes: int = GIB, repeats: int = 5, huge_pages: bool = False
) -> LinkBenchmark:
    """Measure a GPU's link. Takes twice the block of host and of GPU memory, and gives both back.

    Args:
        device: The GPU's number in torch.
        numa_node: The node that the host memory should come from; None for the process's policy.
        block_bytes: How much is copied at a time.
        repeats: Copies that each figure is the median of; one more goes before them, untimed.
        huge_pages: Whether the host memory is asked for as huge pages.

    Returns:
        More than `memory.link.LinkSpeed`: both directions at once, and what page-locking takes.

    Raises:
        LinkNotMeasuredError: If host memory could not be page-locked.
        MemoryError: If the host has not that much memory.
        RuntimeError: torch's own, if the GPU cannot be used or has not that much memory.
    """
    import torch

    from nemo_offload_rl.memory.pinned import PinnedArena

    with (
        torch.cuda.device(device),
        PinnedArena(numa_node=numa_node, pin=True, huge_pages=huge_pages) as arena,
    ):
        torch.cuda.synchronize()  # the context is there, before the clock starts
        page_lock_s = statistics.median(_page_lock_seconds(arena, block_bytes) for _ in range(_PAGE_LOCKINGS))
        outward = arena.allocate("the link's measurement, out", block_bytes)
        back = arena.allocate("the link's measurement, back", block_bytes)
        if not (outward.pinned and back.pinned):
            raise LinkNotMeasuredError(f"{2 * block_bytes / GIB:.2f} GiB of host memory could not be page-locked")
        speeds = _copy_speeds(outward.tensor, back.tensor, repeats)
        arena.release(back)
        arena.release(outward)
        torch.cuda.empty_cache()
    return LinkBenchmark(*speeds, page_lock_gb_per_s=block_bytes / page_lock_s / 1e9)


def _page_lock_seconds(arena: "PinnedArena", nbytes: int) -> float:
    started = time.perf_counter()
    segment = arena.allocate("the measurement of page-locking", nbytes)
    seconds = time.perf_counter() - started
    arena.release(segment)
    return seconds


def _copy_speeds(host_out: "torch.Tensor", host_back: "torch.Tensor", repeats: int) -> tuple[float, float, float]:
    """GB/s out, back and both at once, between host blocks (uint8 [n], page-locked) and blocks of the current GPU."""
    import torch

    from nemo_offload_rl.memory.link import copy_bytes_per_s

    out = host_out, torch.empty_like(host_out, device="cuda")
    back = torch.empty_like(host_back, device="cuda"), host_back
    d2h, h2d, both = (copy_bytes_per_s(*copies, repeats=repeats) / 1e9 for copies in ([out], [back], [out, back]))
    return d2h, h2d, both
