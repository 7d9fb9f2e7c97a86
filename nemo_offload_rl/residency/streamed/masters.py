"""Finds the model shard of each fp32 master, and keeps megatron-core from copying masters that are not on the GPU."""

from collections.abc import Callable
from typing import Any

import torch

_GROUPS = (
    ("shard_fp32_from_float16_groups", "shard_float16_groups"),  # DistributedOptimizer
    ("fp32_from_float16_groups", "float16_groups"),  # Float16OptimizerWithFloat16Params
)


def model_shards(part: Any) -> dict[int, torch.Tensor]:
    """Returns the model shard that each master is a copy of, by the master's id; empty for a plain torch optimizer.

    Args:
        part: one of megatron-core's optimizers.
    """
    for masters, shards in _GROUPS:
        if hasattr(part, masters):
            return {
                id(master): shard
                for group, shard_group in zip(getattr(part, masters), getattr(part, shards), strict=True)
                for master, shard in zip(group, shard_group, strict=True)
                if master is not None and shard is not None
            }
    return {}


def disable_master_copies(part: Any) -> Callable[[], None]:
    """Keep an optimizer of megatron-core from copying masters to the model, which the streamed step has done.

    Returns:
        A function that undoes this.
    """
    name = "_copy_main_params_to_model_params"
    if not hasattr(part, name):
        return lambda: None
    setattr(part, name, lambda: None)
    return lambda: vars(part).pop(name, None)
