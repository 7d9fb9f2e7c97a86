"""Resolves a recipe for the machine: without a GPU, switches off what needs one and says so, one line for each."""

import copy
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.rules.base import OPTIMIZER
from nemo_offload_rl.config.rules.optimizer import STATE_TYPES

_TE = "needs Transformer Engine on a GPU"
_GPU = "needs a GPU"
_FOLLOWS = "follows optimizer.use_precision_aware_optimizer, which " + _TE
_GRAPHS = "needs CUDA graphs of Transformer Engine"

# Key below policy.megatron_cfg: the value that switches it off, and why a CPU needs that.
OFF_ON_CPU: Mapping[str, tuple[Any, str]] = {
    "apply_rope_fusion": (False, _TE),
    "fused_single_qkv_rope": (False, _TE),
    "bias_activation_fusion": (False, _GPU),
    "bias_dropout_fusion": (False, _GPU),
    "gradient_accumulation_fusion": (False, _GPU),
    "masked_softmax_fusion": (False, _GPU),
    "persist_layer_norm": (False, _GPU),
    "moe_permute_fusion": (False, _TE),
    "moe_router_fusion": (False, _TE),
    "moe_grouped_gemm": (False, _GPU),
    "moe_shared_expert_overlap": (False, "needs CUDA streams"),
    "moe_enable_deepep": (False, _GPU),
    "use_fused_weighted_squared_relu": (False, _GPU),
    "use_te_activation_func": (False, _TE),
    "use_transformer_engine_op_fuser": (False, _TE),
    "fine_grained_activation_offloading": (False, _TE),
    "delay_offload_until_cuda_graph": (False, _GRAPHS),
    "cuda_graph_impl": ("none", _GRAPHS),
    "optimizer.use_precision_aware_optimizer": (False, _TE),
    "optimizer.optimizer_cpu_offload": (False, "needs a GPU; here the whole optimizer runs on the CPU"),
    **{f"optimizer.{name}": ("float32", _FOLLOWS) for name in STATE_TYPES},
    "distributed_data_parallel_config.overlap_param_gather": (False, "needs CUDA streams"),
    "distributed_data_parallel_config.overlap_grad_reduce": (False, "needs CUDA streams"),
}


def for_machine(config: Any, *, has_gpus: bool) -> tuple[Any, list[str]]:
    """Resolves a recipe for a machine: without GPUs, switches off every setting that needs one.

    Args:
        config: a validated recipe's config, which is not modified. Its precision is kept.
        has_gpus: whether the ranks have GPUs.

    Returns:
        The config that ranks on this machine run with, and one line for each setting that was switched off.
    """
    if has_gpus:
        return config, []
    adapted = copy.deepcopy(config)
    lines = []
    for path, (off, why) in OFF_ON_CPU.items():
        section: Any = adapted["policy"]["megatron_cfg"]
        *parents, name = path.split(".")
        for parent in parents:
            section = section[parent]
        if name in section and section[name] not in (off, None):
            section[name] = off
            state = "off" if off in (False, "none") else off
            lines.append(f"policy.megatron_cfg.{path} is {state} on this machine: it {why}")
    policy = adapted["policy"]
    optimizer = policy["megatron_cfg"]["optimizer"]
    if optimizer["optimizer"] == "sgd" and optimizer["use_distributed_optimizer"]:
        optimizer["use_distributed_optimizer"] = False
        lines.append(
            f"{OPTIMIZER}.use_distributed_optimizer is off on this machine: it supports sgd only with the CPU optimizer"
        )
    if "generation" in policy and policy["generation"]["backend"] == "vllm":
        policy["generation"]["backend"] = "transformers"
        lines.append("policy.generation.backend is transformers on this machine: vllm " + _GPU)
    if adapted["logger"]["monitor_gpus"]:
        adapted["logger"]["monitor_gpus"] = False
        lines.append("logger.monitor_gpus is off on this machine: it has no GPU")
    return adapted, lines
