"""Defines rules, adaptations and notes, and the decorators that register them."""

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
# Placeholders in `reads`: SECTION in a path stands for the algorithm's section, SPEC alone for its AlgorithmSpec.
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


# A rule's result: a message (what is wrong, what to do) about its first key, or a key and the message; None if all is
# well.
Verdict = str | tuple[str, str] | Conflict | None
Check = Callable[..., Verdict]


@dataclass(frozen=True)
class Rule:
    """Pairs a check with the keys whose values it receives.

    Attributes:
        reads: full paths of the keys whose values `check` receives; one with `?` may be absent and is then None. SPEC
            stands for the recipe's AlgorithmSpec.
        check: the rule.
    """

    reads: tuple[str, ...]
    check: Check


@dataclass(frozen=True)
class Adapted:
    """Holds a value that replaces a recipe's own and leaves a run's numbers the same.

    Attributes:
        path: the key's full path.
        value: the replacement.
        line: what the message to the user says after the key; None if the value is only another spelling.
    """

    path: str
    value: Any
    line: str | None


@dataclass(frozen=True)
class Adaptation:
    """Pairs a function that adapts NeMo-RL's keys with the keys whose values it receives (see `Rule`)."""

    reads: tuple[str, ...]
    adapt: Callable[..., Adapted | None]


ADAPTATIONS: list[Adaptation] = []  # values to replace, before any rule runs
RULES: list[Rule] = []  # checks that must pass
NOTES: list[Rule] = []  # what the user should know about a valid recipe


def rule(*reads: str) -> Callable[[Check], Check]:
    """Registers a check of what must hold between the given keys."""

    def register(check: Check) -> Check:
        RULES.append(Rule(reads, check))
        return check

    return register


def adaptation(*reads: str) -> Callable[[Callable[..., Adapted | None]], Callable[..., Adapted | None]]:
    """Registers a function that replaces a recipe's value, given the values of the keys."""

    def register(adapt: Callable[..., Adapted | None]) -> Callable[..., Adapted | None]:
        ADAPTATIONS.append(Adaptation(reads, adapt))
        return adapt

    return register


def note(*reads: str) -> Callable[[Check], Check]:
    """Registers a check whose message is a note on a valid recipe."""

    def register(check: Check) -> Check:
        NOTES.append(Rule(reads, check))
        return check

    return register
