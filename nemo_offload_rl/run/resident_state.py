"""Decides from this machine's GPU memory whether parameters and optimizer state stay on the GPU beside vLLM."""

from collections.abc import Mapping
from typing import Any

import ray

from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.gpus import gpu_facts
from nemo_offload_rl.plan.resident_state import with_resident_state
from nemo_offload_rl.run.preflight import check_sizes


def smallest_gpu_bytes(cluster: Cluster) -> int | None:
    """Returns the memory of the smallest GPU; None without a GPU, or if a rank is on another machine than this one."""
    if not cluster.has_gpus or cluster.num_nodes > 1:
        return None
    if any(node.address != ray.util.get_node_ip_address() for node in cluster.nodes):  # possible in a joined cluster
        return None
    sizes = [gpu.total_bytes for gpu in gpu_facts()]
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None


def with_resident_state_here(
    config: Mapping[str, Any], algorithm: str, gpu_bytes: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Calls `plan.resident_state.with_resident_state`; takes the arguments of `gpu_sizes.fitted_to_gpus`."""
    return with_resident_state(config, lambda resident: check_sizes(resident, algorithm), gpu_bytes)
