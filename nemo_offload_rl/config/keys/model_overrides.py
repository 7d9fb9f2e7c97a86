"""Reads `policy.megatron_cfg.model_overrides`, NeMo-RL's place for the model's fields that have no key of their own."""

from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config.key_table.table import nemo_rl_paths
from nemo_offload_rl.config.keys.tree import find_key

_SECTION = "policy.megatron_cfg"
_PATH = f"{_SECTION}.model_overrides"


@dataclass(frozen=True)
class MovedFields:
    """Describes the fields of `model_overrides` that became fields of `megatron_cfg`.

    Attributes:
        written_as: the full path of each in the recipe, by its path in `megatron_cfg`.
        problems: (path, message) for each that has a key of its own.
    """

    written_as: dict[str, str]
    problems: list[tuple[str, str]]


def move_model_overrides(config: dict[str, Any], schema: type) -> MovedFields:
    """Moves the fields of `model_overrides` into `megatron_cfg`, where they mean the same and are checked.

    Args:
        config: the recipe's config, modified in place.
        schema: the schema of its algorithm.
    """
    moved = MovedFields({}, [])
    policy = config["policy"] if isinstance(config.get("policy"), dict) else {}
    section = policy["megatron_cfg"] if isinstance(policy.get("megatron_cfg"), dict) else {}
    fields = section.get("model_overrides")
    if not isinstance(fields, dict):  # absent, null, or reported by the schema
        return moved
    section["model_overrides"] = {}
    for name, value in fields.items():
        path, own = f"{_PATH}.{name}", f"{_SECTION}.{name}"
        if name in section or own in nemo_rl_paths() or find_key(schema, own) is not None:
            moved.problems.append((path, f"has a key of its own, {own}; set that, and delete this one"))
        elif value is None:
            moved.problems.append((path, "must have a value; delete it, which leaves the model's own value"))
        else:
            section[name] = value
            moved.written_as[own] = path
    return moved
