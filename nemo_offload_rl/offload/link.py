"""What the link between host and GPU can do, measured once with copies of the engine's own size."""

import statistics

import torch

from nemo_offload_rl.offload.gpu_range import CHUNK_BYTES
from nemo_offload_rl.offload.lanes import Lane
from nemo_offload_rl.offload.measurements import LinkSpeed
from nemo_offload_rl.offload.pinned_arena import PinnedArena

_NUM_COPIES = 8


def measure_link(device: torch.device, arena: PinnedArena) -> LinkSpeed | None:
    """Medians of a few runs of pinned copies each way, alone on the link; None without a GPU or page-locked memory.

    Args:
        device: the GPU.
        arena: lends a chunk of page-locked memory.
    """
    if device.type != "cuda":
        return None
    segment = arena.allocate("link measurement", CHUNK_BYTES)
    try:
        if not segment.pinned:
            return None
        there = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)
        return LinkSpeed(out=_speed(segment.tensor, there, device), back=_speed(there, segment.tensor, device))
    finally:
        arena.release(segment)


def _speed(destination: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    lane = Lane(device)
    lane.follow_current_stream()
    speeds = []
    for _ in range(3):
        begin = lane.mark()
        for _ in range(_NUM_COPIES):
            lane.copy(destination, source)
        end = lane.mark()
        end.wait()
        speeds.append(_NUM_COPIES * source.nbytes / end.seconds_since(begin))
    return statistics.median(speeds)
