"""Decides by this machine's GPUs whether vLLM stays awake while the policy computes."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.plan.awake_engine import with_awake_engine
from nemo_offload_rl.plan.engine_targets import colocates_vllm
from nemo_offload_rl.run.kv_cache import ARGUMENT
from nemo_offload_rl.run.preflight import check_sizes


def with_awake_engine_here(
    config: Mapping[str, Any], algorithm: str, gpu_bytes: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Calls `plan.awake_engine.with_awake_engine` if the recipe leaves the decision open and the sizes are known.

    Takes the arguments of `gpu_sizes.fitted_to_gpus`; the size of the KV cache has been decided before.
    """
    policy = config["policy"]
    if not colocates_vllm(policy) or gpu_bytes is None or policy["residency"]["generation_weights"] is not None:
        return config, []
    if ARGUMENT not in (policy["generation"].get("vllm_kwargs") or {}) or check_sizes(config, algorithm) is None:
        return config, []
    return with_awake_engine(config, hf_config(policy).to_dict(), algorithm=algorithm, gpu_bytes=gpu_bytes)
