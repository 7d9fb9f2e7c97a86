"""Corrects memory statistics for vLLM's pools, which torch still counts while sleep has freed their memory."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.memory import memory_stats


def engine_memory_stats(pools: Mapping[int, Any]) -> dict[str, float]:
    """Returns this process's memory in GiB (see `metrics.memory.memory_stats`), without sleeping blocks.

    Args:
        pools: `pointer_to_data` of vLLM's sleep-mode allocator: its blocks, which know whether they are asleep.

    Returns:
        The statistics of any process, and `gpu_pools_gib`, the blocks that are awake, and `host_pools_gib`, copies of
        sleeping blocks in host memory.
    """
    sleeping = sum(block.handle[1] for block in pools.values() if block.is_asleep)
    awake = sum(block.handle[1] for block in pools.values() if not block.is_asleep)
    copies = (block.cpu_backup_tensor for block in pools.values())
    on_host = sum(copy.numel() * copy.element_size() for copy in copies if copy is not None)
    # Peaks keep the sleeping blocks: every measurement includes a generation, in which all of them are awake.
    return memory_stats(-sleeping) | {"gpu_pools_gib": awake / GIB, "host_pools_gib": on_host / GIB}


def vllm_pools() -> Mapping[int, Any]:
    """Returns the blocks of vLLM's sleep-mode allocator in this process, by address."""
    from vllm.device_allocator import get_mem_allocator_instance

    pools: Mapping[int, Any] = get_mem_allocator_instance().pointer_to_data
    return pools
