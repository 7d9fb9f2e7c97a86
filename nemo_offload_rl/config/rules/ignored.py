"""Refuses overrides of keys that have no effect, since a user who types such a key expects one."""

from collections.abc import Iterator
from typing import Any

from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.recipe import Recipe
from nemo_offload_rl.config.rules.base import OPTIMIZER

# Key: the key that decides whether it is read, and the value with which it is read.
READ_ONLY_WITH: dict[str, tuple[str, str]] = {
    f"{OPTIMIZER}.sgd_momentum": (f"{OPTIMIZER}.optimizer", "sgd"),
    **{f"{OPTIMIZER}.{name}": (f"{OPTIMIZER}.optimizer", "adam") for name in ("adam_beta1", "adam_beta2", "adam_eps")},
}


def ignored_overrides(recipe: Recipe, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Finds overrides of keys that nothing reads; a file may still inherit such keys, as NeMo-RL's recipes do.

    Args:
        recipe: the recipe as it was read.
        config: its values, well-typed or not.

    Yields:
        The full path of a key, and what is wrong with it.
    """
    for path, (switch, needed) in READ_ONLY_WITH.items():
        if path in recipe.origins and recipe.origins[path].override is not None:
            found = _value(config, switch)
            if found is not None and found != needed:
                yield (
                    path,
                    f"has no effect, since {switch} is {show(found)}; delete the override, or set that to {needed}",
                )


def _value(config: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(config, dict) or name not in config:
            return None
        config = config[name]
    return config
