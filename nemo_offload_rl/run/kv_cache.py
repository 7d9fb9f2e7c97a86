"""Sizes vLLM's KV cache in bytes from the plan, so that vLLM does not measure free memory on a GPU that it shares."""

import copy
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.memory.units import show_gib
from nemo_offload_rl.plan.engine_targets import colocates_vllm
from nemo_offload_rl.plan.generation import check_longest_sequence_fits
from nemo_offload_rl.run.preflight import check_sizes

ARGUMENT = "kv_cache_memory_bytes"


def with_kv_cache_bytes(
    config: Mapping[str, Any], algorithm: str, gpu_bytes: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Decides the size of vLLM's KV cache, unless the recipe sets it.

    Args:
        config: a validated recipe, resolved for this machine; not modified.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.
        gpu_bytes: memory of the smallest GPU; None where that is not known.

    Returns:
        The config with `policy.generation.vllm_kwargs.kv_cache_memory_bytes`, and a line for the user; the config
        itself if the recipe sets the size, or the sizes are not known and vLLM has to measure free memory.

    Raises:
        ValueError: the share of the GPU leaves no room for one sequence.
    """
    policy = config["policy"]
    if not colocates_vllm(policy) or gpu_bytes is None:  # on GPUs of its own, vLLM measures free memory
        return config, []
    if ARGUMENT in (policy["generation"].get("vllm_kwargs") or {}):
        return config, []
    planned = check_sizes(config, algorithm)
    if planned is None or planned.engine is None:
        return config, []
    engine = planned.engine
    check_longest_sequence_fits(engine, gpu_bytes)
    nbytes = engine.kv_cache_bytes(gpu_bytes)
    given = copy.deepcopy(dict(config))
    generation = given["policy"]["generation"]
    generation["vllm_kwargs"] = {**(generation.get("vllm_kwargs") or {}), ARGUMENT: nbytes}
    if engine.is_capped(gpu_bytes):
        why = f"room for all {engine.max_num_seqs:,} that vLLM runs at once (max_num_seqs)"
    else:
        why = (
            f"gpu_memory_utilization minus {show_gib(engine.weights_bytes)} GiB of weights and an estimated "
            f"{show_gib(engine.reserve_bytes)} GiB for activations and graphs"
        )
    return given, [
        f"vLLM's KV cache has {show_gib(nbytes)} GiB of each GPU, for {nbytes // engine.sequence_bytes:,} sequences of "
        f"{engine.max_model_len:,} tokens: {why}; policy.generation.vllm_kwargs.{ARGUMENT} sets it"
    ]
