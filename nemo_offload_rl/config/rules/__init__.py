"""Checks what must hold between the keys of a recipe: each rule is one named function.

A rule receives the values of the keys that it reads. It runs only if all of these are in the recipe and well-typed.
"""

from nemo_offload_rl.config.rules import (  # noqa: F401  (importing a module registers its rules)
    activations,
    adaptations,
    architectures,
    batches,
    checkpoints,
    colocated,
    cpu_optimizer,
    dpo,
    experts,
    graphs,
    grpo,
    memory,
    model,
    notes,
    optimizer,
    outcome,
    parallel,
    residency,
    tasks,
    vllm,
)
from nemo_offload_rl.config.rules.base import ADAPTATIONS, NOTES, RULES, Adaptation, Rule

__all__ = ["ADAPTATIONS", "NOTES", "RULES", "Adaptation", "Rule"]
