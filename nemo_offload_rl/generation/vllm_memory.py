"""Counts the memory of vLLM's pools, which sleep gives back to the driver while torch still counts it."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.memory import memory_stats


def engine_memory_stats(pools: Mapping[int, Any]) -> dict[str, float]:
    """This process's memory in GiB (see `metrics.memory.memory_stats`), less what sleeps.

    Args:
        pools: `pointer_to_data` of vLLM's allocator for sleep: each block, and whether it has no GPU memory now.

    Returns:
        Beside those of any process: `gpu_pools_gib`, the blocks that are awake, and `host_pools_gib`, copies of
        sleeping ones in host memory.
    """
    sleeping = sum(block.handle[1] for block in pools.values() if block.is_asleep)
    awake = sum(block.handle[1] for block in pools.values() if not block.is_asleep)
    copies = (block.cpu_backup_tensor for block in pools.values())
    on_host = sum(copy.numel() * copy.element_size() for copy in copies if copy is not None)
    # The peak is of the time when all was awake.
    return memory_stats(-sleeping) | {"gpu_pools_gib": awake / GIB, "host_pools_gib": on_host / GIB}


def vllm_pools() -> Mapping[int, Any]:
    """The blocks of vLLM's allocator for sleep in this process, by address."""
    from vllm.device_allocator import get_mem_allocator_instance

    pools: Mapping[int, Any] = get_mem_allocator_instance().pointer_to_data
    return pools
