"""Says which keys to lower where a refit's buckets find no GPU memory."""

import contextlib
from collections.abc import Iterator

from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.memory.units import GIB


@contextlib.contextmanager
def keys_named_where_memory_runs_out(nbytes: int) -> Iterator[None]:
    """Take the memory of a refit's buckets inside.

    Args:
        nbytes: Of all buckets' buffers.

    Raises:
        OutOfGpuMemoryError: There is not that much.
    """
    try:
        yield
    except OutOfGpuMemoryError as error:
        raise OutOfGpuMemoryError(
            f"The refit finds no {nbytes / GIB:.2f} GiB of GPU memory for its buckets, beside the policy's and the "
            "engine's weights; lower policy.refit_buffer_size_gb or policy.generation.vllm_cfg.gpu_memory_utilization."
        ) from error
