"""Builds the recipe of a case in one of its ways, and asks `nemo-offload-rl plan` about it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_offload_rl.config import load
from nemo_offload_rl.config.validate import for_machine
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.plan.host_budget import HostMemory
from nemo_offload_rl.plan.optimizer_ways import Host, cpu_speed, plan_ways, reason
from nemo_offload_rl.plan.planner import PlannedRun, plan_run
from optimizer_ways.ways import Case, Way

RECIPE = Path(__file__).parents[2] / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
# Nothing is refitted or generated: without these, host memory would be reserved for state offloaded in those phases.
_NOTHING_LEAVES = ("policy.offload_optimizer_for_refit=false", "++policy.residency.table.generate.params=gpu")
_NO_REFERENCE = "loss_fn.reference_policy_kl_penalty=0"


def policy_of(case: Case, way: Way, *, has_gpus: bool) -> dict[str, Any]:
    """Returns the policy section of the recipe, for a machine with GPUs or without."""
    overrides = [*_overrides(case), *_NOTHING_LEAVES, *way.overrides]
    config, _ = for_machine(load(RECIPE, overrides).config, has_gpus=has_gpus)
    policy = {key: value for key, value in config["policy"].items() if key != "generation"}
    return policy | {"hf_config": dict(case.hf_config)}


def planned_run(case: Case, more: Sequence[str]) -> PlannedRun:
    """Plans a case with further overrides of its recipe."""
    validated = load(RECIPE, [*_overrides(case), *more])
    source: Any = {"model_name": "sizes", "hf_config": case.hf_config}
    model = hf_config(source).to_dict()
    return plan_run(validated.config, model, algorithm=validated.algorithm)


def plan_says(case: Case, gpu_bytes: int, memory: HostMemory) -> str:
    """Returns the sentence in which the plan names the way for a GPU.

    Args:
        case: the model and its batches.
        gpu_bytes: memory of the GPU.
        memory: that of its host.
    """
    policy = load(RECIPE, _overrides(case)).config["policy"]
    speed = cpu_speed(len(os.sched_getaffinity(0)))
    planned = plan_ways(policy, lambda more: planned_run(case, more), cpu_params_per_s=speed.params_per_s)
    return reason(planned, gpu_bytes, Host("this machine", memory, "measured"))


def _overrides(case: Case) -> list[str]:
    return [
        _NO_REFERENCE,
        f"policy.max_total_sequence_length={case.seq_length}",
        f"policy.train_micro_batch_size={case.mbs}",
        "policy.sequence_packing.enabled=false",
        "policy.megatron_cfg.empty_unused_memory_level=0",
        *case.overrides,
    ]
