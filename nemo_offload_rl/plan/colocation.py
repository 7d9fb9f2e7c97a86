"""Decides what the policy and a vLLM engine keep on the GPU that they share, where the recipe leaves that open.

In order: training state that stays on the GPU during generation, the size of vLLM's KV cache, an engine that stays
awake while the policy computes, and a policy that is built at the same time as the engine. Each saves a move or a wait
where both fit.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.megatron import is_colocated
from nemo_offload_rl.config.rules.base import TABLE
from nemo_offload_rl.config.rules.residency import AUTO
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig, has_generation
from nemo_offload_rl.memory.units import show_gib
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.generation import (
    EngineMemory,
    check_longest_sequence_fits,
    refit_fits,
    share_beside_policy,
)
from nemo_offload_rl.plan.plan import GENERATION_WEIGHTS_KEY, OffloadPlan, colocates_vllm
from nemo_offload_rl.plan.planner import PlannedRun, Planner
from nemo_offload_rl.plan.row_tokens import open_keys, with_row_tokens
from nemo_offload_rl.plan.shared_gpu import least_beside_awake, phase_bytes, policy_build_bytes, why_not_at_once
from nemo_offload_rl.plan.values import value_at, with_values
from nemo_offload_rl.residency.table import DEDICATED_TABLE, Phase, Placement, Target

PARAMS_CELL = f"{TABLE}.{Phase.GENERATE}.{Target.PARAMS}"
STATE_CELL = f"{TABLE}.{Phase.GENERATE}.{Target.OPTIMIZER_STATE}"
_STATE_CELLS = (f"{TABLE}.{Phase.REFIT}.{Target.OPTIMIZER_STATE}", STATE_CELL)

KV_CACHE_BYTES = "kv_cache_memory_bytes"
"""vLLM's argument for the size of its KV cache."""

_KV_CACHE_KEY = f"policy.generation.vllm_kwargs.{KV_CACHE_BYTES}"
_BUILD_KEY = "policy.generation.vllm_cfg.build_beside_policy"

_BESIDE_TRAINING = {
    target: DEDICATED_TABLE[Phase.GENERATE][target].value
    for target in (Target.PARAMS, Target.GRADS, Target.OPTIMIZER_STATE)
}


def generates_beside_training(config: MasterConfig) -> bool:
    """Returns whether engines sample the answers of later steps on the GPUs where the policy trains meanwhile."""
    sections: Mapping[str, Any] = config
    if "grpo" not in sections or not sections["grpo"]["async_grpo"]["enabled"]:
        return False
    policy = config["policy"]
    return has_generation(policy) and is_colocated(policy)


def with_resident_state(config: MasterConfig, planner: Planner) -> tuple[MasterConfig, list[str]]:
    """Decides where parameters and optimizer state are during generation, where the recipe leaves that open.

    Parameters stay on the GPU if their cell is absent or auto, and they fit. If parameters did not fit, optimizer state
    is not considered. Otherwise it stays on the GPU if it fits and the recipe leaves it open: its cell is auto, or the
    recipe sets neither the cell nor offload_optimizer_for_refit and does not move parameters. Where engines generate
    while the policy trains, or none generate, nothing leaves the GPU.

    Args:
        config: a validated recipe, resolved for the ranks' machine; not modified.
        planner: plans it.

    Returns:
        The config, and a line for each target that stays on the GPU.

    Raises:
        HostBudgetError: a rank needs more host memory than the recipe's limit.
    """
    if generates_beside_training(config):
        return _with_both_on_the_gpu(config)
    policy, gpu_bytes = config["policy"], planner.gpu_bytes
    if not has_generation(policy):  # nothing ever moves; what may move has page-locked host memory all the same
        cells = {PARAMS_CELL: "gpu"}
        if policy["offload_optimizer_for_refit"] is None:
            cells |= dict.fromkeys(_STATE_CELLS, "keep")
        return with_values(config, {key: cells[key] for key in cells if value_at(config, key) in (None, AUTO)}), []
    if not colocates_vllm(policy) or gpu_bytes is None:  # with vLLM on other GPUs, nothing needs to move
        return config, []
    lines = []
    if value_at(config, PARAMS_CELL) in (None, AUTO):
        resident = with_values(config, {PARAMS_CELL: "gpu"})
        planned = planner.plan(resident)
        if planned is None or not _fits(planned, gpu_bytes):
            return config, []
        config = resident
        lines.append(_line("parameters", Target.PARAMS, planned, f"{PARAMS_CELL}=host offloads them"))
    if _leaves_state_to_the_plan(config):
        resident = with_values(config, dict.fromkeys(_STATE_CELLS, "keep"))
        planned = planner.plan(resident)
        if planned is not None and _has_state(planned) and _fits(planned, gpu_bytes):
            config = resident
            lines.append(_line("optimizer state", Target.OPTIMIZER_STATE, planned, f"{STATE_CELL}=host offloads it"))
    return config, lines


def _with_both_on_the_gpu(config: MasterConfig) -> tuple[MasterConfig, list[str]]:
    """Leaves policy and engine on the GPU in every phase, where both compute at the same time.

    Returns:
        The config with an engine that stays awake, and with cells of the residency table that move nothing in phases
        that no longer follow each other, where the recipe leaves them open; and a line for the user.
    """
    values = {GENERATION_WEIGHTS_KEY: "gpu"}
    for target, cell in _BESIDE_TRAINING.items():
        if target is Target.OPTIMIZER_STATE and config["policy"]["offload_optimizer_for_refit"]:
            continue
        cells = [f"{TABLE}.{phase}.{target}" for phase in (Phase.REFIT, Phase.GENERATE)]
        values |= {key: cell for key in cells if value_at(config, key) in (None, AUTO)}
    return with_values(config, values), [
        "engines sample the answers of later steps while the policy trains on the same GPUs (grpo.async_grpo), so "
        "neither leaves the GPU for the other"
    ]


def _leaves_state_to_the_plan(config: MasterConfig) -> bool:
    cells = [value_at(config, key) for key in _STATE_CELLS]
    moves_params = value_at(config, PARAMS_CELL) == Placement.HOST
    says_nothing = not any(cells) and config["policy"]["offload_optimizer_for_refit"] is None
    return AUTO in cells or (says_nothing and not moves_params)


def _has_state(planned: PlannedRun) -> bool:
    """Returns whether a rank has optimizer state that could stay on the GPU."""
    plan = planned.plan
    return not plan.streams_optimizer_state and any(rank.target_bytes[Target.OPTIMIZER_STATE] for rank in plan.ranks)


def _fits(planned: PlannedRun, gpu_bytes: int) -> bool:
    """Returns whether the policy's state fits on the GPU beside the engine, in generation and in a refit."""
    plan, engine = planned.plan, planned.engine
    return (
        engine is not None
        and refit_fits(plan, engine, gpu_bytes)
        and engine.share_of(gpu_bytes) <= share_beside_policy(plan, engine, gpu_bytes)
    )


def _line(name: str, target: Target, planned: PlannedRun, remedy: str) -> str:
    nbytes = max(rank.target_bytes[target] for rank in planned.plan.ranks)
    subject = "stay" if target is Target.PARAMS else "stays"
    pronoun = "they fit" if target is Target.PARAMS else "it fits"
    return (
        f"the policy's {name}, {show_gib(nbytes)} GiB a rank, {subject} on the GPU during generation, since {pronoun} "
        f"there together with vLLM; {remedy}"
    )


def with_kv_cache_bytes(config: MasterConfig, planner: Planner) -> tuple[MasterConfig, list[str]]:
    """Decides the size of vLLM's KV cache, unless the recipe sets it, so that vLLM does not measure free memory.

    Args:
        config: a validated recipe, resolved for the ranks' machine; not modified.
        planner: plans it.

    Returns:
        The config with `policy.generation.vllm_kwargs.kv_cache_memory_bytes`, and a line for the user; the config
        itself if the recipe sets the size, or the sizes are not known and vLLM has to measure free memory.

    Raises:
        ValueError: the share of the GPU, or training at the same time, leaves no room for one sequence, or for the size
            that the recipe sets.
    """
    policy, gpu_bytes, beside = config["policy"], planner.gpu_bytes, generates_beside_training(config)
    # On GPUs of its own, vLLM measures free memory.
    if not colocates_vllm(policy) or gpu_bytes is None:
        return config, []
    own = _kv_cache_bytes(policy)
    if own is not None and not beside:
        return config, []
    planned = planner.plan(config)
    if planned is None or planned.engine is None:
        return config, []
    engine = planned.engine
    check_longest_sequence_fits(engine, gpu_bytes)
    nbytes = engine.kv_cache_bytes(gpu_bytes)
    given = with_values(config, {_KV_CACHE_KEY: nbytes})
    lacking = _lacking_bytes(given, planner, gpu_bytes) if beside else 0
    if lacking > 0:
        nbytes -= lacking
        if nbytes < engine.sequence_bytes:
            raise ValueError(
                f"grpo.async_grpo generates beside training on the same GPUs, where {show_gib(gpu_bytes)} GiB lack "
                f"{show_gib(engine.sequence_bytes - nbytes)} GiB for both with a KV cache of one sequence; stream the "
                "optimizer state (policy.residency.table.train.optimizer_state), lower the tokens of a micro-batch, or "
                "give generation GPUs of its own (policy.generation.colocated.enabled=false)."
            )
        if own is not None:
            raise ValueError(
                f"{_KV_CACHE_KEY} is {own}, but beside training (grpo.async_grpo) the "
                f"GPU's {show_gib(gpu_bytes)} GiB have room for {nbytes}; set it to that or less, or delete it."
            )
        given = with_values(config, {_KV_CACHE_KEY: nbytes})
        why = "what training leaves of the GPU at the same time"
    elif own is not None:
        return config, []
    elif engine.is_capped(gpu_bytes):
        why = f"room for all {engine.max_num_seqs:,} that vLLM runs at once (max_num_seqs)"
    else:
        why = (
            f"gpu_memory_utilization minus {show_gib(engine.weights_bytes)} GiB of weights and an estimated "
            f"{show_gib(engine.reserve_bytes)} GiB for activations and graphs"
        )
    return given, [
        f"vLLM's KV cache has {show_gib(nbytes)} GiB of each GPU, for {nbytes // engine.sequence_bytes:,} sequences of "
        f"{engine.max_model_len:,} tokens: {why}; {_KV_CACHE_KEY} sets it"
    ]


def _lacking_bytes(config: MasterConfig, planner: Planner, gpu_bytes: int) -> int:
    """Returns the GPU memory that policy and awake engine lack in the phase that takes most, or while they are built.

    Packed rows that the recipe leaves open count with their least tokens.
    """
    run = planner.plan(config)
    if run is None or run.engine is None:
        return 0
    built = policy_build_bytes(run.plan)
    most = built + run.engine.awake_bytes(gpu_bytes)
    if open_keys(config):
        most = max(most, least_beside_awake(run.plan, run.engine, gpu_bytes))
    else:
        most = max(most, *phase_bytes(config, planner, run, gpu_bytes).values())
    return most - gpu_bytes


def _kv_cache_bytes(policy: GRPOPolicyConfig) -> int | None:
    """Returns the size of vLLM's KV cache that the recipe or the plan sets; None where vLLM measures free memory."""
    size: int | None = policy["generation"]["vllm_kwargs"].get(KV_CACHE_BYTES)
    return size


def with_awake_engine(config: MasterConfig, planner: Planner) -> tuple[MasterConfig, list[str]]:
    """Lets vLLM keep its weights and KV cache on the GPU if they fit there in every phase, and during the build.

    Where the recipe leaves the tokens of packed rows open, vLLM stays awake only if the rows come out as long as beside
    a vLLM that sleeps: longer rows save more time than a shorter switch.

    Args:
        config: a validated recipe, resolved for the ranks' machine, with the KV cache's bytes; not modified.
        planner: plans it.

    Returns:
        The config, and a line for the user if the engine stays awake; the config itself if the recipe decides it, the
        sizes are not known, or vLLM measures free memory.
    """
    policy, gpu_bytes = config["policy"], planner.gpu_bytes
    if not colocates_vllm(policy) or gpu_bytes is None or policy["residency"]["generation_weights"] is not None:
        return config, []
    if _kv_cache_bytes(policy) is None or planner.plan(config) is None:
        return config, []
    awake = with_values(config, {GENERATION_WEIGHTS_KEY: "gpu"})
    with_rows = _with_the_same_rows(config, awake, planner)
    found = None if with_rows is None else _most_bytes(with_rows, planner, gpu_bytes)
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
    awake, needed = engine.awake_bytes(gpu_bytes), least_beside_awake(plan, engine, gpu_bytes)
    if engine.stays_awake and needed > gpu_bytes:
        raise ValueError(
            f"{GENERATION_WEIGHTS_KEY} is gpu, so vLLM keeps {show_gib(awake)} GiB during training, and training "
            f"needs at least {show_gib(needed - awake)} GiB, but the GPU has {show_gib(gpu_bytes)} GiB; set it to "
            "discard, or lower policy.generation.vllm_kwargs.max_num_seqs or the tokens of a micro-batch."
        )


def _with_the_same_rows(config: MasterConfig, awake: MasterConfig, planner: Planner) -> MasterConfig | None:
    """Returns the config with an awake engine and numbers for its packed rows.

    Returns None where a sleeping engine would allow other numbers.
    """
    if not open_keys(config):
        return awake
    without_hosts = dataclasses.replace(planner, hosts=())
    try:
        asleep_rows, awake_rows = (with_row_tokens(one, without_hosts)[0] for one in (config, awake))
    except ValueError:  # the longest sample does not fit; the rows' own decision raises the error for the user
        return None
    are_the_same = asleep_rows["policy"]["sequence_packing"] == awake_rows["policy"]["sequence_packing"]
    return awake_rows if are_the_same else None


def _most_bytes(config: MasterConfig, planner: Planner, gpu_bytes: int) -> tuple[Phase, int, int] | None:
    """Returns the phase that takes the most GPU memory, its bytes, and the engine's bytes.

    Returns None where the policy and the engine cannot be built at the same time, or the sizes are not known.
    """
    run = planner.plan(config)
    if run is None or why_not_at_once(run, gpu_bytes) is not None:
        return None
    assert run.engine is not None, "the recipe has vLLM"
    try:
        of_phases = phase_bytes(config, planner, run, gpu_bytes)
    except UnknownArchitectureError:
        return None
    phase = max(of_phases, key=lambda one: of_phases[one])
    return phase, of_phases[phase], run.engine.awake_bytes(gpu_bytes)


def with_engine_build(config: MasterConfig, planner: Planner) -> tuple[MasterConfig, list[str]]:
    """Decides whether vLLM and the policy are built at the same time, where the recipe leaves that open.

    vLLM measures the GPU's free memory during its build unless it is given the KV cache's size in bytes, so only then
    can the policy be built meanwhile.

    Args:
        config: a validated recipe, resolved for the ranks' machine, with the KV cache's bytes; not modified.
        planner: plans it.

    Returns:
        The config with `policy.generation.vllm_cfg.build_beside_policy` true or false, and a line for the user if the
        plan knows both sizes and vLLM does not measure free memory; the config itself if the recipe decides it.
    """
    policy, gpu_bytes = config["policy"], planner.gpu_bytes
    if not has_generation(policy) or policy["generation"]["backend"] != "vllm" or value_at(config, _BUILD_KEY) != AUTO:
        return config, []
    apart = with_values(config, {_BUILD_KEY: False})
    if not colocates_vllm(policy) or gpu_bytes is None or _kv_cache_bytes(policy) is None:
        return apart, []
    planned = planner.plan(config)
    if planned is None:
        return apart, []
    reason = why_not_at_once(planned, gpu_bytes)
    if reason is not None:
        return apart, [f"the policy is built after vLLM, not at the same time: {reason}"]
    # True is the plan's alone: no recipe may say it.
    return with_values(config, {_BUILD_KEY: True}), [
        "the policy and vLLM are built at the same time, since the GPU has room for both; "
        f"{_BUILD_KEY}=false builds the policy after vLLM"
    ]
