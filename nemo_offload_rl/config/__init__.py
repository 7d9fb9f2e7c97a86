"""Recipes: reading, checking and adapting them. Imports neither torch nor ray."""

from nemo_offload_rl.config.keys.tree import resolve_absent_keys
from nemo_offload_rl.config.named_files import check_named_files
from nemo_offload_rl.config.problems import Origin, Problem, RecipeError
from nemo_offload_rl.config.recipe import Recipe, load_recipe
from nemo_offload_rl.config.validate import ValidatedRecipe, check_rules, for_machine, load, validate

__all__ = [
    "Origin",
    "Problem",
    "Recipe",
    "RecipeError",
    "ValidatedRecipe",
    "check_named_files",
    "check_rules",
    "for_machine",
    "load",
    "load_recipe",
    "resolve_absent_keys",
    "validate",
]
