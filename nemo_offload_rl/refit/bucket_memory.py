"""Names the keys to lower if a refit runs out of GPU memory for its buckets."""

import contextlib
from collections.abc import Iterator

from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.memory.units import GIB


@contextlib.contextmanager
def explain_refit_oom(nbytes: int) -> Iterator[None]:
    """Adds the keys to lower to an out-of-memory error of the allocation inside this context.

    Args:
        nbytes: the size of all buckets' buffers in bytes.

    Raises:
        OutOfGpuMemoryError: The GPU does not have that much memory.
    """
    try:
        yield
    except OutOfGpuMemoryError as error:
        raise OutOfGpuMemoryError(
            f"Cannot allocate {nbytes / GIB:.2f} GiB of GPU memory for the refit's buckets beside the policy's and "
            "the engine's weights; lower policy.refit_buffer_size_gb or "
            "policy.generation.vllm_cfg.gpu_memory_utilization."
        ) from error
