"""Checks what must hold between the keys of a recipe: each rule is one named function.

A rule receives the values of the keys that it reads. It runs only if all of these are in the recipe and well-typed.
docs/decisions/rules.md says which mistakes get a rule.
"""

from nemo_offload_rl.config.rules import (  # noqa: F401  (importing a module registers its rules)
    adaptations,
    grpo,
    model,
    modules,
    outcome,
    pairs,
    parallel,
    residency,
    vllm,
)
from nemo_offload_rl.config.rules.base import ADAPTATIONS, NOTES, RULES, Rule

__all__ = ["ADAPTATIONS", "NOTES", "RULES", "Rule"]
