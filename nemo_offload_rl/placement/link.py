"""Measures the speed of a GPU's link to page-locked host memory, and computes the link's limit."""

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_offload_rl.memory.units import GIB

if TYPE_CHECKING:
    import torch

    from nemo_offload_rl.memory.pinned import PinnedArena

# PCI Express: GB/s per lane in one direction after line coding (8b/10b, 128b/130b, flits from generation 6 on), before
# headers.
_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}

# A virtual machine may get its memory only on first touch: 1.6 GB/s on an H200's host then, and 5.3 GB/s later.
_PAGE_LOCKINGS = 3


class LinkNotMeasuredError(RuntimeError):
    """Says why the link cannot be measured here."""


@dataclass(frozen=True)
class LinkBenchmark:
    """Holds measured speeds, GB/s (1e9 bytes): medians of copies of one block between page-locked memory and a GPU.

    Attributes:
        d2h_gb_per_s: From the GPU to the host, alone.
        h2d_gb_per_s: From the host to the GPU, alone.
        both_gb_per_s: Both directions at once, summed.
        page_lock_gb_per_s: Speed of mapping, touching and page-locking host memory of the block's size.
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
    """Measures a GPU's link; takes twice `block_bytes` of host and of GPU memory meanwhile.

    Args:
        device: The GPU's index in torch.
        numa_node: The NUMA node to take host memory from; None for the process's memory policy.
        block_bytes: Bytes of each copy.
        repeats: Number of copies of which each speed is the median; an untimed copy comes first.
        huge_pages: Whether to use huge pages for the host memory.

    Returns:
        The speeds; beyond `memory.link.LinkSpeed`, of both directions at once and of page-locking.

    Raises:
        LinkNotMeasuredError: If host memory could not be page-locked.
        MemoryError: If the host does not have that much memory.
        RuntimeError: From torch, if the GPU cannot be used or does not have that much memory.
    """
    import torch

    from nemo_offload_rl.memory.pinned import PinnedArena

    with (
        torch.cuda.device(device),
        PinnedArena(numa_node=numa_node, pin=True, huge_pages=huge_pages) as arena,
    ):
        torch.cuda.synchronize()  # creates the CUDA context before the timing starts
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
    """Returns the GB/s of copies out, back and both at once, between page-locked blocks (uint8 [n]) and the GPU."""
    import torch

    from nemo_offload_rl.memory.link import copy_bytes_per_s

    out = host_out, torch.empty_like(host_out, device="cuda")
    back = torch.empty_like(host_back, device="cuda"), host_back
    d2h, h2d, both = (copy_bytes_per_s(*copies, repeats=repeats) / 1e9 for copies in ([out], [back], [out, back]))
    return d2h, h2d, both
