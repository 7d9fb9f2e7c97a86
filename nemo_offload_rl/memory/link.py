"""Measures the speed of copies between page-locked host memory and a GPU, in pieces of the size the engine copies."""

import statistics
from dataclasses import dataclass

import torch

from nemo_offload_rl.memory.gpu_range import CHUNK_BYTES
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.streams import CopyStream, record_current_stream

Copy = tuple[torch.Tensor, torch.Tensor]
"""Destination and source."""


@dataclass(frozen=True)
class LinkSpeed:
    """Holds the speed of copies between page-locked host memory and a GPU in bytes a second, each direction alone."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float


def measure_link(device: torch.device, arena: PinnedArena) -> LinkSpeed | None:
    """Measure a GPU's link; returns None without a GPU or page-locked memory.

    Args:
        device: the GPU.
        arena: lends a chunk of page-locked memory.
    """
    if device.type != "cuda":
        return None
    segment = arena.allocate("link measurement", CHUNK_BYTES)
    try:
        return _measure(segment.tensor, device) if segment.pinned else None
    finally:
        arena.release(segment)


def _measure(host: torch.Tensor, device: torch.device) -> LinkSpeed:
    gpu = torch.empty_like(host, device=device)
    return LinkSpeed(
        d2h_bytes_per_s=copy_bytes_per_s((host, gpu), repeats=3, num_copies=8),
        h2d_bytes_per_s=copy_bytes_per_s((gpu, host), repeats=3, num_copies=8),
    )


def copy_bytes_per_s(*copies: Copy, repeats: int, num_copies: int = 1) -> float:
    """Time copies that start together, each on its own stream, and return the median of their combined speed.

    Args:
        copies: each between a GPU and page-locked memory.
        repeats: number of timed runs, after one that is not timed.
        num_copies: how many times in a row each copy is made in a run.
    """
    device = next(tensor.device for tensor in copies[0] if tensor.is_cuda)
    streams = [CopyStream(device) for _ in copies]

    def seconds() -> float:
        start = record_current_stream(device)
        ends = []
        for stream, copy in zip(streams, copies, strict=True):
            stream.follow(start)
            for _ in range(num_copies):
                stream.copy(*copy)
            ends.append(stream.mark())
        for end in ends:
            end.wait()
        return max(end.seconds_since(start) for end in ends)

    seconds()
    nbytes = num_copies * sum(source.nbytes for _, source in copies)
    return nbytes / statistics.median(seconds() for _ in range(repeats))
