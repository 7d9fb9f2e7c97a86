"""Checks a valid recipe against this machine and the model's sizes, before anything is built."""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import torch

from nemo_offload_rl.config.megatron.device_split import is_colocated
from nemo_offload_rl.config.megatron.graph_modules import check_graph_environment
from nemo_offload_rl.config.model.unsupported_models import check_model
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.placement.gpus import gpu_facts
from nemo_offload_rl.placement.machine import host_facts
from nemo_offload_rl.plan.activations import limit_where_unknown
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.awake_engine import check_awake_engine_fits
from nemo_offload_rl.plan.generation import check_longest_sequence_fits, check_refit_fits, check_share_beside_policy
from nemo_offload_rl.plan.host_budget import check_host_budget, check_state_fits_host
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import PlannedRun, plan_run
from nemo_offload_rl.plan.row_tokens import open_keys
from nemo_offload_rl.run.row_tokens import with_row_tokens_here
from nemo_offload_rl.worker.environment import library_environment


def check_before_start(config: Mapping[str, Any], algorithm: str) -> None:
    """Raises, before Ray is started, the errors that workers on this machine would raise after building the model.

    Args:
        config: a validated recipe, resolved for this machine.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.

    Raises:
        HostBudgetError: as in `check_sizes`; or this machine has too little memory: without GPUs, for the model; as the
            only node with GPUs, for the state that its ranks keep in host memory.
        ValueError: as in `check_sizes`; the environment does not allow CUDA graphs; vLLM is missing, its share of the
            GPU does not fit beside the policy's, it cannot stay awake beside training as the recipe says, its KV cache
            cannot hold one sequence, a refit's buckets do not fit, or packed rows of the longest sequence do not fit.
    """
    policy = config["policy"]
    uses_vllm = "generation" in policy and policy["generation"]["backend"] == "vllm"
    if uses_vllm and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            'policy.generation.backend is vllm, which is not installed; run make setup EXTRAS="te vllm", or set it to '
            "transformers."
        )
    megatron = policy["megatron_cfg"]
    if megatron["cuda_graph_impl"] != "none":
        check_graph_environment(os.environ | library_environment(megatron, refit_follows="generation" in policy))
    asks_gpus = uses_vllm or open_keys(config)
    sizes = [gpu.total_bytes for gpu in gpu_facts() if gpu.total_bytes is not None] if asks_gpus else []
    config, _ = with_row_tokens_here(config, algorithm, min(sizes, default=None))
    planned = check_sizes(config, algorithm)
    if planned is not None and torch.cuda.device_count() == 0:
        check_state_fits_host(planned.first_host_state_bytes, host_facts())
    elif planned is not None and config["cluster"]["num_nodes"] == 1:
        check_host_budget(planned.needs, {planned.needs[0].host: host_facts()}, planned.plan.host_memory_limit_bytes)
    if planned is not None and planned.engine is not None and sizes:
        if is_colocated(policy):
            check_share_beside_policy(planned.plan, planned.engine, min(sizes))
            check_refit_fits(planned.plan, planned.engine, min(sizes))
            check_awake_engine_fits(planned.plan, planned.engine, min(sizes))
        check_longest_sequence_fits(planned.engine, min(sizes))


def check_sizes(config: Mapping[str, Any], algorithm: str) -> PlannedRun | None:
    """Plans the recipe, and raises an error if it does not fit.

    The model's config comes from the recipe, from a folder, or from the hub, which may be its cache.

    Args:
        config: a validated recipe, resolved for the workers' machine.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.

    Returns:
        The plan; None where the model's sizes are not known here.

    Raises:
        HostBudgetError: a rank needs more host memory than the recipe's limit.
        ValueError: the model's config cannot be read; the host memory for activations is not known; the model cannot be
            split as the recipe says; Megatron or vLLM would not compute it as transformers does.
    """
    policy = config["policy"]
    fields = hf_config(policy).to_dict()
    check_model(fields, policy)
    try:
        return plan_run(config, fields, algorithm=algorithm)
    except UnknownArchitectureError as error:
        activations = settings(policy).activations
        if activations is not None:
            limit_where_unknown(activations, error)
        return None
