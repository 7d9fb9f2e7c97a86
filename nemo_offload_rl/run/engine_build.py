"""Decides from this machine's GPU memory whether the policy is built at the same time as vLLM, or after it."""

import copy
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.plan.engine_build import why_not_at_once
from nemo_offload_rl.plan.engine_targets import colocates_vllm
from nemo_offload_rl.run.kv_cache import ARGUMENT
from nemo_offload_rl.run.preflight import check_sizes

KEY = "build_beside_policy"


def with_engine_build(
    config: Mapping[str, Any], algorithm: str, gpu_bytes: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Decides whether vLLM and the policy are built at the same time, where the recipe leaves that open.

    vLLM measures the GPU's free memory during its build unless it is given the KV cache's size in bytes, so only then
    can the policy be built meanwhile.

    Args:
        config: a validated recipe, resolved for this machine and with the KV cache's bytes; not modified.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.
        gpu_bytes: memory of the smallest GPU; None where that is not known.

    Returns:
        The config with `policy.generation.vllm_cfg.build_beside_policy` set, and a line for the user; the config itself
        if the recipe decides it, the sizes are not known, or vLLM measures free memory.
    """
    policy = config["policy"]
    if not colocates_vllm(policy) or gpu_bytes is None:
        return config, []
    generation = policy["generation"]
    if generation["vllm_cfg"][KEY] != "auto" or ARGUMENT not in (generation.get("vllm_kwargs") or {}):
        return config, []
    planned = check_sizes(config, algorithm)
    if planned is None or planned.engine is None:
        return config, []
    has_random_weights = policy.get("hf_config") is not None
    reason = why_not_at_once(planned.plan, planned.engine, gpu_bytes, has_random_weights=has_random_weights)
    decided = copy.deepcopy(dict(config))
    decided["policy"]["generation"]["vllm_cfg"][KEY] = reason is None
    if reason is not None:
        return decided, [f"the policy is built after vLLM, not at the same time: {reason}"]
    return decided, [
        "the policy and vLLM are built at the same time, since the GPU has room for both; "
        f"policy.generation.vllm_cfg.{KEY}=false builds the policy after vLLM"
    ]
