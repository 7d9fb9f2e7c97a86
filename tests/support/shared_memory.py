"""What shared host memory this process has."""

import contextlib
import os


def num_open_buffers() -> int:
    """Files without a name that buffers of `memory/shared_buffer.py` are behind, mappings of them included."""
    num = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            num += "memfd:nemo_offload_rl" in os.readlink(f"/proc/self/fd/{name}")
    return num
