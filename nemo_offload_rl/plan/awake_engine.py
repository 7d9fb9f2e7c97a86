"""Decides whether vLLM stays awake while the policy computes on the same GPU: nothing moves that need not."""

import copy
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.memory.units import show_gib
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.engine_build import why_not_at_once
from nemo_offload_rl.plan.engine_targets import GENERATION_WEIGHTS_KEY
from nemo_offload_rl.plan.generation import POLICY_OVERHEAD_BYTES, EngineMemory
from nemo_offload_rl.plan.phase_memory import phase_bytes
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.plan.planner import plan_run
from nemo_offload_rl.plan.row_tokens import open_keys, with_row_tokens
from nemo_offload_rl.residency.table import Phase


def with_awake_engine(
    config: Mapping[str, Any], hf_config: Mapping[str, Any], *, algorithm: str, gpu_bytes: int
) -> tuple[Mapping[str, Any], list[str]]:
    """Have vLLM keep weights and KV cache on the GPU where every phase has room for them, the build included.

    Where the tokens of packed rows are left open, it does so if they come out as long as beside a vLLM that sleeps:
    longer rows are worth more than a shorter switch.

    Args:
        config: a validated recipe that leaves `policy.residency.generation_weights` open, with vLLM on the policy's
            GPUs and its KV cache in bytes; it is left as it is.
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.
        gpu_bytes: memory of the smallest GPU.

    Returns:
        The config, and a line if the engine stays awake.
    """
    awake = copy.deepcopy(dict(config))
    awake["policy"]["residency"]["generation_weights"] = "gpu"
    try:
        with_rows = _with_the_same_rows(config, awake, hf_config, algorithm, gpu_bytes)
        found = None if with_rows is None else _most_bytes(with_rows, hf_config, algorithm, gpu_bytes)
    except UnknownArchitectureError:
        return config, []
    if found is None:
        return config, []
    phase, most, engine_bytes = found
    if most > gpu_bytes:
        return config, []
    return awake, [
        f"vLLM keeps its weights and KV cache, {show_gib(engine_bytes)} GiB with all else, while the policy computes: "
        f"the {phase} phase, which takes most, has room for both ({show_gib(most)} of {show_gib(gpu_bytes)} GiB); "
        f"{GENERATION_WEIGHTS_KEY}=discard has it sleep"
    ]


def check_awake_engine_fits(plan: OffloadPlan, engine: EngineMemory, gpu_bytes: int) -> None:
    """Refuse an engine that is to stay awake where training has no room beside it, whatever activations need above.

    Args:
        plan: with the sizes of every pipeline stage.
        engine: what it takes.
        gpu_bytes: memory of the smallest GPU.

    Raises:
        ValueError: it does not fit.
    """
    awake = engine.awake_bytes(gpu_bytes)
    least = max(
        sum(rank.gpu_bytes[Phase.TRAIN].values()) + max(rank.least_activation_bytes, rank.step_grad_bytes)
        for rank in plan.ranks
    )
    needed = least + POLICY_OVERHEAD_BYTES + engine.refit_graph_bytes + awake
    if engine.stays_awake and needed > gpu_bytes:
        raise ValueError(
            f"{GENERATION_WEIGHTS_KEY} is gpu, so that vLLM keeps {show_gib(awake)} GiB while the policy trains, which "
            f"takes at least {show_gib(needed - awake)} GiB, but the GPU has {show_gib(gpu_bytes)} GiB; set it to "
            "discard, or lower policy.generation.vllm_kwargs.max_num_seqs or the tokens of a micro-batch."
        )


def _with_the_same_rows(
    config: Mapping[str, Any], awake: Mapping[str, Any], hf_config: Mapping[str, Any], algorithm: str, gpu_bytes: int
) -> Mapping[str, Any] | None:
    """The config with an awake engine and numbers for its packed rows; None where these would be others than asleep."""
    if not open_keys(config):
        return awake
    chosen = []
    for one in (config, awake):
        try:
            chosen.append(with_row_tokens(one, hf_config, algorithm=algorithm, gpu_bytes=gpu_bytes)[0])
        except ValueError:  # the longest sample has no room, which `run.row_tokens` tells
            return None
    asleep_rows, awake_rows = (one["policy"]["sequence_packing"] for one in chosen)
    return chosen[1] if asleep_rows == awake_rows else None


def _most_bytes(
    config: Mapping[str, Any], hf_config: Mapping[str, Any], algorithm: str, gpu_bytes: int
) -> tuple[Phase, int, int] | None:
    """The phase that takes most of a GPU, its bytes and the engine's; None where both cannot be built there."""
    run = plan_run(config, hf_config, algorithm=algorithm)
    assert run.engine is not None, "the recipe has vLLM"
    random = config["policy"].get("hf_config") is not None
    if why_not_at_once(run.plan, run.engine, gpu_bytes, has_random_weights=random) is not None:
        return None
    of_phases = phase_bytes(config, hf_config, run, run.engine, algorithm=algorithm, gpu_bytes=gpu_bytes)
    phase = max(of_phases, key=lambda one: of_phases[one])
    return phase, of_phases[phase], run.engine.awake_bytes(gpu_bytes)
