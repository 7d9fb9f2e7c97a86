"""Checks what must hold between the keys of a recipe: one named function a rule.

A rule gets the values of the keys that it reads. It is asked only where all of these are in the recipe and well-typed.
"""

from nemo_offload_rl.config.rules import (  # noqa: F401  (each of them registers its rules)
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
