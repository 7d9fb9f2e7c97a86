"""Reads the resources of this process that a cycle of phases could leak."""

import gc
import threading
from pathlib import Path

import psutil
import torch

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.streams import CopyStream, _CudaEvent, _HostEvent
from nemo_offload_rl.residency.transfer import Transfer


def counts() -> dict[str, int]:
    """Returns the numbers of threads, handles and objects, which must not grow with the number of cycles."""
    gc.collect()
    kinds = {"tensors": torch.Tensor, "copy streams": CopyStream, "events": (_CudaEvent, _HostEvent), "moves": Transfer}
    if torch.cuda.is_available():
        kinds |= {"CUDA streams": torch.cuda.Stream, "CUDA events": torch.cuda.Event}
    alive = gc.get_objects()
    return {
        "threads": threading.active_count(),
        "file descriptors": psutil.Process().num_fds(),
        "page-locked bytes": PinnedArena.live_bytes(),
        **{name: sum(issubclass(type(item), kind) for item in alive) for name, kind in kinds.items()},
    }


def levels() -> dict[str, float]:
    """Returns what varies a little from cycle to cycle: memory mappings, and with a GPU its memory in MiB."""
    # Host memory is not measured: blocks of varying sizes leave gaps between them, which fill up over many cycles.
    mappings = {"mappings": len(Path("/proc/self/maps").read_text().splitlines())}
    if not torch.cuda.is_available():
        return mappings
    free, total = torch.cuda.mem_get_info()
    return mappings | {"reserved": torch.cuda.memory_reserved() / 2**20, "used by the driver": (total - free) / 2**20}
