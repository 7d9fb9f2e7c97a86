"""Keeps the policy's parameters on the GPU beside vLLM where both fit: nothing moves that need not."""

import copy
from collections.abc import Mapping
from typing import Any

import ray

from nemo_offload_rl.memory.units import show_gib
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.gpus import gpu_facts
from nemo_offload_rl.plan.engine_targets import has_vllm_beside_it
from nemo_offload_rl.plan.generation import share_beside_policy
from nemo_offload_rl.residency.table import Phase, Target
from nemo_offload_rl.run.preflight import check_sizes

CELL = f"policy.residency.table.{Phase.GENERATE}.{Target.PARAMS}"


def smallest_gpu_bytes(cluster: Cluster) -> int | None:
    """Returns the memory of the smallest GPU; None without one, or where ranks are on other machines than this."""
    if not cluster.has_gpus or cluster.num_nodes > 1:
        return None
    if any(node.address != ray.util.get_node_ip_address() for node in cluster.nodes):  # of a cluster that was joined
        return None
    sizes = [gpu.total_bytes for gpu in gpu_facts()]
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None


def with_resident_params(
    config: Mapping[str, Any], algorithm: str, gpu_bytes: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Decide where parameters are during generation, unless the recipe says so.

    Args:
        config: a validated recipe, resolved for this machine; it is left as it is.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.
        gpu_bytes: memory of the smallest GPU; None where that is not known.

    Returns:
        The config, and a line where parameters stay on the GPU.
    """
    policy = config["policy"]
    table = policy["residency"]["table"] or {}
    is_written = Phase.GENERATE in table and Target.PARAMS in table[Phase.GENERATE]
    if not has_vllm_beside_it(policy) or is_written or gpu_bytes is None:  # they stay on GPUs of their own
        return config, []
    resident = copy.deepcopy(dict(config))
    cells = {**(table.get(Phase.GENERATE) or {}), Target.PARAMS.value: "gpu"}
    resident["policy"]["residency"]["table"] = {**table, Phase.GENERATE.value: cells}
    planned = check_sizes(resident, algorithm)
    if planned is None or planned.engine is None:
        return config, []
    if planned.engine.share_of(gpu_bytes) > share_beside_policy(planned.plan, gpu_bytes):
        return config, []
    params = max(rank.target_bytes[Target.PARAMS] for rank in planned.plan.ranks)
    return resident, [
        f"the policy's parameters, {show_gib(params)} GiB a rank, stay on the GPU during generation, since they fit "
        f"there beside vLLM; {CELL}=host moves them"
    ]
