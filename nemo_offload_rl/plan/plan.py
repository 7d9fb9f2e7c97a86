"""Defines `OffloadPlan`: a recipe's residency settings as plain values, and which key set each cell of the table.

The engine's weights and KV cache have a table of their own, since the engine moves them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeGuard

from nemo_offload_rl.activation_offload.schedule import ActivationOptions
from nemo_offload_rl.config.megatron import is_colocated
from nemo_offload_rl.config.rules.base import TABLE
from nemo_offload_rl.config.rules.residency import AUTO, FLAG_PHASES, FOR_REFIT, flag_cell
from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig, PolicyConfig, has_generation
from nemo_offload_rl.memory.units import GIB, MIB
from nemo_offload_rl.placement.rates import H200_RATES
from nemo_offload_rl.plan.activations import ModuleBytes
from nemo_offload_rl.plan.saved_tensors import ActivationFacts
from nemo_offload_rl.residency.table import DEDICATED_TABLE, DEFAULT_TABLE, Phase, Placement, ShardFacts, Table, Target

GENERATION_WEIGHTS_KEY = "policy.residency.generation_weights"
"""The recipe's key for where vLLM keeps its weights."""

# Assumed speed of the CPU's copies between pageable memory and the staging buffers: the slower of the two directions on
# an H200's host (19 GB/s to the host, 10 back).
STAGED_BYTES_PER_S = 10e9

# Share of its speed that each direction keeps while the other one is busy: 50.9 of 55.4 GB/s on that H200.
TWO_WAY_SHARE = 0.92


class EngineTarget(StrEnum):
    """Names a kind of state of a generation engine that shares the policy's GPUs."""

    GENERATION_WEIGHTS = "generation_weights"
    KV_CACHE = "kv_cache"


EngineTable = Mapping[Phase, Mapping[EngineTarget, str]]

_AWAKE = (Phase.REFIT, Phase.GENERATE)


@dataclass(frozen=True)
class Traffic:
    """Counts the bytes of one target that cross the link when a phase is entered, or in an optimizer step."""

    target: Target
    d2h_bytes: int
    h2d_bytes: int
    seconds: float


@dataclass(frozen=True)
class Transition:
    """Describes the change from one phase of a step to the next, on one rank."""

    source: Phase
    phase: Phase
    traffic: tuple[Traffic, ...]

    @property
    def seconds(self) -> float:
        """Time on the link if nothing overlaps."""
        return sum(move.seconds for move in self.traffic)


@dataclass(frozen=True)
class RankActivations:
    """Counts the bytes of the activations that one rank of a pipeline stage offloads in a training step.

    Attributes:
        facts: the sizes that the byte counts are computed from.
        modules: bytes of each offloaded module, in forward order.
        needed_bytes: host memory for everything that is in flight at once.
        slab_bytes: host memory that the rank pins: the recipe's limit, or `needed_bytes` where there is none.
    """

    facts: ActivationFacts
    modules: Mapping[str, ModuleBytes]
    needed_bytes: int
    slab_bytes: int


@dataclass(frozen=True)
class RankPlan:
    """Counts the bytes that one rank of a pipeline stage holds.

    Attributes:
        stage: the pipeline stage.
        facts: the sizes that the byte counts are computed from.
        target_bytes: size of each target.
        gpu_bytes: for each phase of a step, the bytes of each target on the GPU.
        host_bytes: host memory that each target needs.
        transitions: the changes of phase, in the order of a step.
        step_traffic: traffic within each optimizer step: streamed optimizer state, both ways.
        activations: the offloaded activations; None where they stay on the GPU.
        fixed_bytes: host memory, by name, of buffers that never move, such as the pool of activations or the CPU
            optimizer's state.
        step_grad_bytes: GPU memory of fp32 copies of bf16 gradients during the optimizer step.
        least_activation_bytes: the least GPU memory that activations and logits need in training before that step.
    """

    stage: int
    facts: ShardFacts
    target_bytes: Mapping[Target, int]
    gpu_bytes: Mapping[Phase, Mapping[Target, int]]
    host_bytes: Mapping[Target, int]
    transitions: tuple[Transition, ...]
    step_traffic: tuple[Traffic, ...] = ()
    activations: RankActivations | None = None
    fixed_bytes: Mapping[str, int] = field(default_factory=dict)
    step_grad_bytes: int = 0
    least_activation_bytes: int = 0

    @property
    def all_traffic(self) -> list[Traffic]:
        """Returns all traffic of a step, with that within its optimizer step."""
        return [move for transition in self.transitions for move in transition.traffic] + [*self.step_traffic]

    @property
    def total_host_bytes(self) -> int:
        """Returns all host memory that the rank needs."""
        return sum(self.host_bytes.values()) + sum(self.fixed_bytes.values())

    @property
    def logprob_state_bytes(self) -> int:
        """Returns the GPU memory of training state during log-prob passes.

        Optimizer state counts as in training, since it is prefetched during the last pass; gradients come after it.
        """
        held, training = self.gpu_bytes[Phase.LOGPROB], self.gpu_bytes[Phase.TRAIN]
        return sum(
            nbytes if target is Target.GRADS else max(nbytes, training[target]) for target, nbytes in held.items()
        )


@dataclass(frozen=True)
class OffloadPlan:
    """Holds a recipe's residency settings, and the memory and time that they cost.

    Attributes:
        table: where each target lives in each phase.
        sources: the recipe's key that set a cell, for the cells that a key set.
        pinned: whether the host memory of optimizer state is page-locked, as that of all other targets is; if not, its
            copies are staged.
        verify: whether checksums of everything that moves are compared.
        huge_pages: whether host buffers use huge pages.
        host_memory_limit_bytes: the most host memory that one rank may take; None for no limit.
        numa: "auto", "none" or the number of a NUMA node.
        stream_window_bytes: size of the GPU buffer that optimizer state is streamed through.
        link_bytes_per_s: speed of page-locked copies in one direction, from which times are computed.
        activations: the options of activation offloading; None where it is off.
        engine_table: where an engine on the same GPUs has its weights and KV cache; empty without such an engine.
        engine_remark: a line for the user on the key that changes that table.
        ranks: memory of one rank of each pipeline stage; empty where the model's sizes were not given.
    """

    table: Table
    sources: Mapping[Phase, Mapping[Target, str]]
    pinned: bool
    verify: bool
    huge_pages: bool
    host_memory_limit_bytes: int | None
    numa: str | int
    stream_window_bytes: int
    link_bytes_per_s: float
    activations: ActivationOptions | None = None
    engine_table: EngineTable = field(default_factory=dict)
    engine_remark: str = ""
    ranks: tuple[RankPlan, ...] = ()

    @property
    def streams_optimizer_state(self) -> bool:
        """Whether optimizer state stays on the host in training and is streamed through a GPU buffer."""
        return self.table[Phase.TRAIN][Target.OPTIMIZER_STATE] is Placement.STREAMED

    def bytes_per_s(self, target: Target) -> float:
        """Returns the speed of a target's copies in one direction."""
        if target is Target.OPTIMIZER_STATE and not self.pinned:
            return min(STAGED_BYTES_PER_S, self.link_bytes_per_s)
        return self.link_bytes_per_s

    @property
    def largest_rank(self) -> RankPlan:
        """The rank that needs most host memory; among equals, the one that holds most state."""
        assert self.ranks, "the plan was made without the model's sizes"
        return max(self.ranks, key=lambda rank: (rank.total_host_bytes, sum(rank.target_bytes.values())))


def settings(policy: PolicyConfig) -> OffloadPlan:
    """Returns the plan without sizes: the settings of the recipe's `policy` section, with absent keys resolved."""
    table, sources = _table_and_sources(policy)
    section = policy["residency"]
    limit = section["host_memory_limit_gib"]
    return OffloadPlan(
        table=table,
        sources=sources,
        pinned=policy["use_pinned_optimizer_offload"],
        verify=section["verify"],
        huge_pages=section["huge_pages"],
        host_memory_limit_bytes=None if limit is None else int(limit * GIB),
        numa=policy["numa"],
        stream_window_bytes=section["stream_window_mib"] * MIB,
        link_bytes_per_s=H200_RATES.link_bytes_per_s,
        activations=activation_settings(policy),
        engine_table=engine_table(policy),
        engine_remark=engine_remark(policy),
    )


def activation_settings(policy: PolicyConfig) -> ActivationOptions | None:
    """Returns the options of activation offloading of the recipe's `policy` section; None where it is off."""
    cfg, section = policy["megatron_cfg"], policy["activation_offload"]
    if not cfg["fine_grained_activation_offloading"]:
        return None
    limit = section["host_memory_limit_gib"]
    return ActivationOptions(
        modules=tuple(cfg["offload_modules"] or ()),
        fraction=cfg["activation_offload_fraction"],
        min_elements=cfg["min_offloaded_tensor_size"],
        host_memory_limit_bytes=None if limit is None else int(limit * GIB),
        strict=section["strict"],
    )


def _table_and_sources(policy: PolicyConfig) -> tuple[Table, Mapping[Phase, Mapping[Target, str]]]:
    """Returns the residency table, and the key that set each cell.

    The recipe's offload flags override the default table, and single cells override both.
    """
    colocated = is_colocated(policy)
    table = {phase: dict(cells) for phase, cells in (DEFAULT_TABLE if colocated else DEDICATED_TABLE).items()}
    sources: dict[Phase, dict[Target, str]] = {phase: {} for phase in Phase}
    for flag, phases in FLAG_PHASES.items():
        value: Any = policy.get(flag.removeprefix("policy."))
        if value is None or (flag == FOR_REFIT and not colocated):
            continue
        for phase in phases:
            table[Phase(phase)][Target.OPTIMIZER_STATE] = Placement(flag_cell(value))
            sources[Phase(phase)][Target.OPTIMIZER_STATE] = flag
    written: Mapping[str, Any] = policy["residency"]["table"] or {}
    for phase, cells in written.items():
        for target, cell in cells.items():
            if cell == AUTO:  # not decided: the default stays
                continue
            table[Phase(phase)][Target(target)] = Placement(cell)
            sources[Phase(phase)][Target(target)] = f"{TABLE}.{phase}.{target}"
    return table, sources


def colocates_vllm(policy: PolicyConfig) -> TypeGuard[GRPOPolicyConfig]:
    """Returns whether vLLM generates on the GPUs of this policy, given the validated `policy` section."""
    return has_generation(policy) and policy["generation"]["backend"] == "vllm" and is_colocated(policy)


def keeps_generation_weights(policy: PolicyConfig) -> bool:
    """Returns whether a sleeping vLLM keeps its weights in host memory, so that only a changed policy needs a refit.

    Args:
        policy: the recipe's `policy` section, validated, with its absent keys resolved.
    """
    return colocates_vllm(policy) and policy["residency"]["generation_weights"] == "host"


def stays_awake(policy: PolicyConfig) -> bool:
    """Returns whether the engine keeps its weights and KV cache on the GPU while the policy computes there.

    Args:
        policy: as in `keeps_generation_weights`, with the decision of `plan.colocation` where the recipe leaves it
            open.
    """
    shared = has_generation(policy) and is_colocated(policy)
    return shared and policy["residency"]["generation_weights"] == "gpu"


def engine_table(policy: PolicyConfig) -> EngineTable:
    """Returns where the engine has its weights and KV cache in each phase.

    Empty without an engine, or where the engine has GPUs of its own.

    Args:
        policy: as in `keeps_generation_weights`.

    Returns:
        For each phase "gpu", "host", "discarded", or "gpu at its end".
    """
    if not has_generation(policy) or not is_colocated(policy):
        return {}
    if stays_awake(policy):
        return {phase: dict.fromkeys(EngineTarget, "gpu") for phase in Phase}
    asleep = "discarded" if colocates_vllm(policy) and not keeps_generation_weights(policy) else "host"
    cache = dict.fromkeys(Phase, "discarded") | {Phase.GENERATE: "gpu"}
    if colocates_vllm(policy):
        cache[Phase.REFIT] = "gpu at its end"
    return {
        phase: {
            EngineTarget.GENERATION_WEIGHTS: "gpu" if phase in _AWAKE else asleep,
            EngineTarget.KV_CACHE: cache[phase],
        }
        for phase in Phase
    }


def engine_remark(policy: PolicyConfig) -> str:
    """Returns a line for the user: which key changes the placements of `engine_table`."""
    if not colocates_vllm(policy):
        if stays_awake(policy):
            return "the transformers engine keeps its weights on the GPU, and a KV cache while it generates"
        return "generation_weights and kv_cache belong to the transformers engine, and no key changes where they live"
    if stays_awake(policy):
        return (
            f"vLLM does not sleep; {GENERATION_WEIGHTS_KEY}=discard makes it free its GPU memory for training, unless "
            "it generates meanwhile"
        )
    if keeps_generation_weights(policy):
        return f"generation_weights and kv_cache belong to vLLM; {GENERATION_WEIGHTS_KEY}=discard frees the host memory"
    return (
        "generation_weights and kv_cache belong to vLLM; the next refit resends discarded weights; "
        f"{GENERATION_WEIGHTS_KEY}=host keeps them in host memory"
    )
