"""Defines how ranks are divided into model-parallel groups, for the recipe, the plan, the worker and Megatron alike."""

import math

# The keys of policy.megatron_cfg whose product is the ranks of a model replica, and of a replica of the experts.
REPLICA_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
EXPERT_REPLICA_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size")


def data_parallel_size(world_size: int, *sizes: int) -> int | None:
    """Returns how many replicas the ranks hold; None where they are no multiple of the sizes' product."""
    replicas, rest = divmod(world_size, math.prod(sizes))
    return None if rest else replicas
