"""Defines how a rule is written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MEGATRON = "policy.megatron_cfg"
TP = f"{MEGATRON}.tensor_model_parallel_size"
PP = f"{MEGATRON}.pipeline_model_parallel_size"
CP = f"{MEGATRON}.context_parallel_size"
EP = f"{MEGATRON}.expert_model_parallel_size"
ETP = f"{MEGATRON}.expert_tensor_parallel_size"
OPTIMIZER = f"{MEGATRON}.optimizer"
SCHEDULER = f"{MEGATRON}.scheduler"
DDP = f"{MEGATRON}.distributed_data_parallel_config"
LENGTH, DIVISOR = "policy.max_total_sequence_length", "policy.make_sequence_length_divisible_by"
PACKING = "policy.sequence_packing.enabled"
GPUS, NODES = "cluster.gpus_per_node", "cluster.num_nodes"
COLOCATED = "policy.generation.colocated?"
REFIT_TRANSPORT = "policy.generation.refit_transport"
# The arguments of `config.model.model_kind.model_fields`, and of `model_kind` there.
MODEL_FIELDS = ("policy.model_name", "policy.hf_config?", "policy.hf_config_overrides?")
MODEL = (*MODEL_FIELDS, f"{MEGATRON}.moe_layer_freq?")
# Reads of a rule for every algorithm: in a path, the section that marks the recipe; alone, its AlgorithmSpec.
SECTION, SPEC = "{algorithm}", "{spec}"


@dataclass(frozen=True)
class Conflict:
    """Reports two keys that contradict each other.

    Attributes:
        path: the key that the problem is reported at.
        message: what is wrong and what to do.
        also: the other key; where it was written is added to the message.
    """

    path: str
    message: str
    also: str


# What is wrong and what to do, said of the rule's first key, or of the one named before it; None where all is well.
Verdict = str | tuple[str, str] | Conflict | None
Check = Callable[..., Verdict]


@dataclass(frozen=True)
class Rule:
    """Pairs a check with the keys whose values it gets.

    Attributes:
        reads: full paths of the keys whose values `check` gets; one with `?` may be absent and is then None. SPEC
            gets the recipe's AlgorithmSpec.
        check: the rule.
    """

    reads: tuple[str, ...]
    check: Check


@dataclass(frozen=True)
class Adapted:
    """Names a value that is used in place of a recipe's own, and that leaves a run's numbers as they would be.

    Attributes:
        path: the key's full path.
        value: the value that is used.
        line: what the user is told, behind the key; None for another spelling of the same thing.
    """

    path: str
    value: Any
    line: str | None


@dataclass(frozen=True)
class Adaptation:
    """Pairs a function that makes an `Adapted` of NeMo-RL's keys with the keys whose values it gets (see `Rule`)."""

    reads: tuple[str, ...]
    adapt: Callable[..., Adapted | None]


ADAPTATIONS: list[Adaptation] = []  # what is read otherwise than it is written, before any rule
RULES: list[Rule] = []  # what must hold
NOTES: list[Rule] = []  # what is worth saying of a valid recipe


def rule(*reads: str) -> Callable[[Check], Check]:
    """Decorates what must hold between keys."""

    def register(check: Check) -> Check:
        RULES.append(Rule(reads, check))
        return check

    return register


def adaptation(*reads: str) -> Callable[[Callable[..., Adapted | None]], Callable[..., Adapted | None]]:
    """Decorates what is read otherwise than it is written."""

    def register(adapt: Callable[..., Adapted | None]) -> Callable[..., Adapted | None]:
        ADAPTATIONS.append(Adaptation(reads, adapt))
        return adapt

    return register


def note(*reads: str) -> Callable[[Check], Check]:
    """Decorates what is worth saying of a valid recipe."""

    def register(check: Check) -> Check:
        NOTES.append(Rule(reads, check))
        return check

    return register
