"""Decides, from a recipe with its settings of activations and a machine, everything else that depends on the machine.

All functions are pure: facts about machine and model are arguments. A run calls `plan.resolve.resolve`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_offload_rl.config import for_machine
from nemo_offload_rl.config.megatron import is_colocated
from nemo_offload_rl.config.model.families import check_model
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.policy import REPLAYED, PolicyConfig
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.host import HostFacts
from nemo_offload_rl.placement.rates import H200_RATES, Rates
from nemo_offload_rl.plan.activations import limit_where_unknown
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.colocation import (
    check_awake_engine_fits,
    with_awake_engine,
    with_engine_build,
    with_kv_cache_bytes,
    with_resident_state,
)
from nemo_offload_rl.plan.generation import check_longest_sequence_fits, check_refit_fits, check_share_beside_policy
from nemo_offload_rl.plan.host_budget import check_state_fits_host
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import PlannedRun, Planner
from nemo_offload_rl.plan.row_tokens import with_context_ranks, with_row_tokens
from nemo_offload_rl.plan.shared_gpu import policy_peaks

# The order matters: resident state leaves less room for packed rows; the KV cache leaves less room for an engine that
# stays awake, and for building the policy at the same time as the engine.
_DECISIONS = (
    with_resident_state,
    with_kv_cache_bytes,
    with_awake_engine,
    with_engine_build,
    with_row_tokens,
    with_context_ranks,
)


@dataclass(frozen=True)
class Machine:
    """Describes the nodes that a run has.

    Attributes:
        has_gpus: whether ranks have GPUs.
        gpu_bytes: memory of the smallest GPU; None where there is none, or where it is not known.
        hosts: memory of each node, in the order of the ranks; empty where it is not to be checked.
        rates: those of a GPU and its host, from which seconds are predicted.
    """

    has_gpus: bool
    gpu_bytes: int | None = None
    hosts: Sequence[HostFacts] = ()
    rates: Rates = H200_RATES


@dataclass(frozen=True)
class Resolved:
    """Holds what a run does on a machine.

    Attributes:
        config: the recipe with every setting decided that depends on the machine.
        run: its plan; None where the model's sizes are not known.
        lines: a line for the user about each decision.
        problems: errors of decisions that were not possible, since the machine is too small.
        peaks_gib: GiB of `policy_peaks`; empty without GPUs, without a plan, or with problems.
        chosen: the overrides that `policy.activation_memory: auto` stands for on this machine.
    """

    config: MasterConfig
    run: PlannedRun | None
    lines: tuple[str, ...] = ()
    problems: tuple[ValueError, ...] = ()
    peaks_gib: Mapping[str, float] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()


def decide(config: MasterConfig, planner: Planner, *, has_gpus: bool) -> Resolved:
    """Decides every setting that depends on the machine but those of `policy.activation_memory`; plans the result.

    Args:
        config: a validated recipe's config; not modified.
        planner: knows the model, the algorithm and the machine.
        has_gpus: whether ranks have GPUs.

    Raises:
        HostBudgetError, ValueError: as in `plan.resolve.resolve`.
    """
    config, replayed = without_replayed_engine(config)
    check_model(planner.hf_config, config["policy"])
    config, lines = for_machine(config, has_gpus=has_gpus)
    if has_gpus:
        _check_attention(config["policy"])
    lines = [*replayed, *lines]
    problems = []
    for decision in _DECISIONS:
        try:
            config, decided = decision(config, planner)
        except ValueError as error:
            problems.append(error)
        else:
            lines += decided
    try:
        run = planner.run(config)
    except UnknownArchitectureError as error:
        run = None
        activations = settings(config["policy"]).activations
        if activations is not None:
            limit_where_unknown(activations, error)
    peaks = policy_peaks(config, planner, run) if has_gpus and run is not None and not problems else {}
    peaks_gib = {verb: nbytes / GIB for verb, nbytes in peaks.items()}
    return Resolved(config, run, tuple(lines), tuple(problems), peaks_gib)


def _check_attention(policy: PolicyConfig) -> None:
    """Refuses what Transformer Engine has no attention for: its kernel for float32 keeps all keys on one rank."""
    size = policy["megatron_cfg"]["context_parallel_size"]
    if size > 1 and policy["precision"] == "float32":
        raise ValueError(
            f"policy.precision is float32 with policy.megatron_cfg.context_parallel_size {size}, for which Transformer "
            "Engine has no attention on GPUs; set policy.precision to bfloat16, or context_parallel_size to 1."
        )


def without_replayed_engine(config: MasterConfig) -> tuple[MasterConfig, list[str]]:
    """Returns the config without an engine where the run replays rollouts, and a line for the user about it."""
    sections: Mapping[str, Any] = config
    folder = sections["grpo"]["debug"]["replay_rollouts"] if "grpo" in sections else None
    if folder is None:
        return config, []
    policy = dict(config["policy"])
    policy[REPLAYED] = policy.pop("generation")
    without: Any = {**config, "policy": policy}
    line = (
        f"grpo.debug.replay_rollouts is {folder}: the run starts no engine, needs no memory for generation and refit, "
        "and does not validate"
    )
    return without, [line]


def check_fits(resolved: Resolved, machine: Machine) -> None:
    """Raises, before a process starts, the error that a rank or an engine would raise after building the model.

    Args:
        resolved: the recipe as it runs on the machine.
        machine: the machine.

    Raises:
        HostBudgetError: a host has too little memory: without GPUs, for the model; otherwise for the state that its
            ranks keep in host memory.
        ValueError: a decision was not possible; vLLM's share of the GPU does not fit beside the policy's, it cannot
            stay awake beside training as the recipe says, its KV cache cannot hold one sequence, or a refit's buckets
            do not fit.
    """
    for problem in resolved.problems:
        raise problem
    run = resolved.run
    if run is None:
        return
    if machine.has_gpus:
        run.check_hosts(machine.hosts)
    elif machine.hosts:
        check_state_fits_host(run.first_host_state_bytes, machine.hosts[0])
    if run.engine is not None and machine.gpu_bytes is not None:
        if is_colocated(resolved.config["policy"]):
            check_share_beside_policy(run.plan, run.engine, machine.gpu_bytes)
            check_refit_fits(run.plan, run.engine, machine.gpu_bytes)
            check_awake_engine_fits(run.plan, run.engine, machine.gpu_bytes)
        check_longest_sequence_fits(run.engine, machine.gpu_bytes)
