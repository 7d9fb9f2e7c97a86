"""Resolves a recipe for the machine: without a GPU, switches off what needs one and says so, one line for each."""

import copy
from typing import Any

from nemo_offload_rl.config.key_table.row import Kind
from nemo_offload_rl.config.key_table.table import not_allowed
from nemo_offload_rl.config.keys.schema_problems import value_at
from nemo_offload_rl.config.rules.base import OPTIMIZER


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
    for row, path, _ in not_allowed(adapted, Kind.OFF_ON_CPU):
        section, _, name = path.rpartition(".")
        value_at(adapted, section)[name] = row.values[0]
        state = "off" if row.values[0] in (False, "none") else row.values[0]
        lines.append(f"{path} is {state} on this machine: it {row.why}")
    policy = adapted["policy"]
    optimizer = policy["megatron_cfg"]["optimizer"]
    if optimizer["optimizer"] == "sgd" and optimizer["use_distributed_optimizer"]:
        optimizer["use_distributed_optimizer"] = False
        lines.append(
            f"{OPTIMIZER}.use_distributed_optimizer is off on this machine: it supports sgd only with the CPU optimizer"
        )
    if "generation" in policy and policy["generation"]["backend"] == "vllm":
        policy["generation"]["backend"] = "transformers"
        lines.append("policy.generation.backend is transformers on this machine: vllm needs a GPU")
    if adapted["logger"]["monitor_gpus"]:
        adapted["logger"]["monitor_gpus"] = False
        lines.append("logger.monitor_gpus is off on this machine: it has no GPU")
    profile = adapted["logger"]["profile"] or {}
    for key in ("memory", "nvtx"):
        if profile.get(key):
            profile[key] = False
            lines.append(f"logger.profile.{key} is off on this machine: it has no GPU")
    return adapted, lines
