"""What this machine and the model's sizes tell of a valid recipe, checked before Ray starts."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_offload_rl.config import adapt_to_cpu
from nemo_offload_rl.config.graph_modules import check_graph_environment
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.placement.cluster import starts_ray_here
from nemo_offload_rl.plan.activations import limit_where_unknown
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import plan_run
from nemo_offload_rl.worker.environment import library_environment


def check_before_ray(config: Mapping[str, Any], algorithm: str) -> None:
    """Refuse what workers would refuse once they have built the model.

    The environment of a cluster that runs already, and the sizes of a model of a hub, are left to the workers.

    Args:
        config: a validated recipe.
        algorithm: a key of `ALGORITHMS`.

    Raises:
        HostBudgetError: a rank needs more host memory than the recipe's limit.
        ValueError: the host memory for activations is not known, the model cannot be split as the recipe says, or
            the environment does not go with CUDA graphs.
    """
    if starts_ray_here():
        if not torch.cuda.device_count():
            config, _ = adapt_to_cpu(config)
        megatron = config["policy"]["megatron_cfg"]
        if megatron["cuda_graph_impl"] != "none":
            check_graph_environment(os.environ | library_environment(megatron))
    _check_sizes(config, algorithm)


def _check_sizes(config: Mapping[str, Any], algorithm: str) -> None:
    policy = config["policy"]
    if not policy.get("hf_config") and not Path(policy["model_name"]).is_dir():
        return
    try:
        plan_run(config, hf_config(policy).to_dict(), algorithm=algorithm)
    except UnknownArchitectureError as error:
        activations = settings(policy).activations
        if activations is not None:
            limit_where_unknown(activations, error)
