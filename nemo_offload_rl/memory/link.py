"""What the link between host and GPU can do, measured once with copies of the engine's own size."""

import statistics
from dataclasses import dataclass

import torch

from nemo_offload_rl.memory.gpu_range import CHUNK_BYTES
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.streams import CopyStream

_NUM_COPIES = 8


@dataclass(frozen=True)
class LinkSpeed:
    """Of pinned copies between host and GPU, bytes a second."""

    out: float
    back: float


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
    copy_stream = CopyStream(device)
    copy_stream.follow_current_stream()
    speeds = []
    for _ in range(3):
        begin = copy_stream.mark()
        for _ in range(_NUM_COPIES):
            copy_stream.copy(destination, source)
        end = copy_stream.mark()
        end.wait()
        speeds.append(_NUM_COPIES * source.nbytes / end.seconds_since(begin))
    return statistics.median(speeds)
