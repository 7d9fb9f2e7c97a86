"""Decides whether vLLM stays awake while the policy computes on the same GPU, which saves moving its memory."""

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
    """Lets vLLM keep its weights and KV cache on the GPU if they fit there in every phase, and during the build.

    Where the recipe leaves the tokens of packed rows open, vLLM stays awake only if the rows come out as long as beside
    a vLLM that sleeps: longer rows save more time than a shorter switch.

    Args:
        config: a validated recipe that leaves `policy.residency.generation_weights` open, with vLLM on the policy's
            GPUs and its KV cache in bytes; not modified.
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.
        gpu_bytes: memory of the smallest GPU.

    Returns:
        The config, and a line for the user if the engine stays awake.
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
        f"vLLM stays awake with {show_gib(engine_bytes)} GiB while the policy computes, since the GPU has room for "
        f"both in the {phase} phase, which needs the most ({show_gib(most)} of {show_gib(gpu_bytes)} GiB); "
        f"{GENERATION_WEIGHTS_KEY}=discard makes it sleep"
    ]


def check_awake_engine_fits(plan: OffloadPlan, engine: EngineMemory, gpu_bytes: int) -> None:
    """Checks that training fits on the GPU beside an engine that stays awake, with the least memory for activations.

    Args:
        plan: the offload plan, with the sizes of every pipeline stage.
        engine: the memory that the engine takes.
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
            f"{GENERATION_WEIGHTS_KEY} is gpu, so vLLM keeps {show_gib(awake)} GiB during training, and training "
            f"needs at least {show_gib(needed - awake)} GiB, but the GPU has {show_gib(gpu_bytes)} GiB; set it to "
            "discard, or lower policy.generation.vllm_kwargs.max_num_seqs or the tokens of a micro-batch."
        )


def _with_the_same_rows(
    config: Mapping[str, Any], awake: Mapping[str, Any], hf_config: Mapping[str, Any], algorithm: str, gpu_bytes: int
) -> Mapping[str, Any] | None:
    """Returns the config with an awake engine and numbers for its packed rows.

    Returns None where a sleeping engine would allow other numbers.
    """
    if not open_keys(config):
        return awake
    chosen = []
    for one in (config, awake):
        try:
            chosen.append(with_row_tokens(one, hf_config, algorithm=algorithm, gpu_bytes=gpu_bytes)[0])
        except ValueError:  # the longest sample does not fit; `run.row_tokens` raises the error for the user
            return None
    asleep_rows, awake_rows = (one["policy"]["sequence_packing"] for one in chosen)
    return chosen[1] if asleep_rows == awake_rows else None


def _most_bytes(
    config: Mapping[str, Any], hf_config: Mapping[str, Any], algorithm: str, gpu_bytes: int
) -> tuple[Phase, int, int] | None:
    """Returns the phase that takes the most GPU memory, its bytes, and the engine's bytes.

    Returns None where the policy and the engine cannot be built at the same time.
    """
    run = plan_run(config, hf_config, algorithm=algorithm)
    assert run.engine is not None, "the recipe has vLLM"
    random = config["policy"].get("hf_config") is not None
    if why_not_at_once(run.plan, run.engine, gpu_bytes, has_random_weights=random) is not None:
        return None
    of_phases = phase_bytes(config, hf_config, run, run.engine, algorithm=algorithm, gpu_bytes=gpu_bytes)
    phase = max(of_phases, key=lambda one: of_phases[one])
    return phase, of_phases[phase], run.engine.awake_bytes(gpu_bytes)
