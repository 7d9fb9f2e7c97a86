"""Defines how ranks form model-parallel groups, for the recipe, the plan, the worker and Megatron alike."""

import math

# Keys of policy.megatron_cfg whose product is the number of ranks of a model replica, and of a replica of the experts.
REPLICA_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
EXPERT_REPLICA_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size")


def data_parallel_size(world_size: int, *sizes: int) -> int | None:
    """Returns the number of replicas on the ranks; None if their number is no multiple of the sizes' product."""
    replicas, rest = divmod(world_size, math.prod(sizes))
    return None if rest else replicas
