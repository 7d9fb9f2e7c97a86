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
CPU_OPTIMIZER = f"{OPTIMIZER}.optimizer_cpu_offload"
DISTRIBUTED = f"{OPTIMIZER}.use_distributed_optimizer"
PRECISION_AWARE = f"{OPTIMIZER}.use_precision_aware_optimizer"
SCHEDULER = f"{MEGATRON}.scheduler"
DDP = f"{MEGATRON}.distributed_data_parallel_config"
LENGTH, DIVISOR = "policy.max_total_sequence_length", "policy.make_sequence_length_divisible_by"
PACKING = "policy.sequence_packing.enabled"
GPUS, NODES = "cluster.gpus_per_node", "cluster.num_nodes"
COLOCATED = "policy.generation.colocated?"
REFIT_TRANSPORT = "policy.generation.refit_transport"
OFFLOADING = f"{MEGATRON}.fine_grained_activation_offloading"
TABLE = "policy.residency.table"
# The arguments of `config.model.families.model_fields`, and of `has_experts` there.
MODEL_FIELDS = ("policy.model_name", "policy.hf_config?", "policy.hf_config_overrides?")
MODEL = (*MODEL_FIELDS, f"{MEGATRON}.moe_layer_freq?")
# Placeholders in `reads`: SECTION in a path stands for the algorithm's section, SPEC alone for its AlgorithmSpec.
SECTION, SPEC = "{algorithm}", "{spec}"

# A message (what is wrong, what to do) about the rule's first key, or a key and the message; None if all is well.
RuleResult = str | tuple[str, str] | None


@dataclass(frozen=True)
class Rule:
    """Pairs a check with the keys whose values it receives.

    Attributes:
        reads: full paths of the keys whose values `check` receives; one with `?` may be absent and is then None. SPEC
            stands for the recipe's AlgorithmSpec.
        check: returns a `RuleResult`; that of an adaptation returns an `Adapted`, or None.
    """

    reads: tuple[str, ...]
    check: Callable[..., Any]


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


ADAPTATIONS: list[Rule] = []  # values to replace, before any rule runs
RULES: list[Rule] = []  # checks that must pass
NOTES: list[Rule] = []  # what the user should know about a valid recipe

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _register(rules: list[Rule], reads: tuple[str, ...]) -> Decorator:
    def register(check: Callable[..., Any]) -> Callable[..., Any]:
        rules.append(Rule(reads, check))
        return check

    return register


def rule(*reads: str) -> Decorator:
    """Registers a check of what must hold between the given keys."""
    return _register(RULES, reads)


def adaptation(*reads: str) -> Decorator:
    """Registers a function that replaces a recipe's value, given the values of the keys."""
    return _register(ADAPTATIONS, reads)


def note(*reads: str) -> Decorator:
    """Registers a check whose message is a note on a valid recipe."""
    return _register(NOTES, reads)
