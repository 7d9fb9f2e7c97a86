"""Decides by this machine's GPUs whether parameters and optimizer state stay on them beside vLLM."""

from collections.abc import Mapping
from typing import Any

import ray

from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.gpus import gpu_facts
from nemo_offload_rl.plan.resident_state import with_resident_state
from nemo_offload_rl.run.preflight import check_sizes


def smallest_gpu_bytes(cluster: Cluster) -> int | None:
    """Returns the memory of the smallest GPU; None without one, or where ranks are on other machines than this."""
    if not cluster.has_gpus or cluster.num_nodes > 1:
        return None
    if any(node.address != ray.util.get_node_ip_address() for node in cluster.nodes):  # of a cluster that was joined
        return None
    sizes = [gpu.total_bytes for gpu in gpu_facts()]
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None


def with_resident_state_here(
    config: Mapping[str, Any], algorithm: str, gpu_bytes: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Decides as `plan.resident_state.with_resident_state` does; arguments are those of `gpu_sizes.fitted_to_gpus`."""
    return with_resident_state(config, lambda resident: check_sizes(resident, algorithm), gpu_bytes)
