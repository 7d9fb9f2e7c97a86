"""Reads `policy.megatron_cfg.model_overrides`, NeMo-RL's place for the model's fields that have no key of their own."""

from typing import Any

from nemo_offload_rl.config.key_table.table import nemo_rl_paths
from nemo_offload_rl.config.keys.tree import find_key

_SECTION = "policy.megatron_cfg"
_PATH = f"{_SECTION}.model_overrides"


def move_model_overrides(config: dict[str, Any], schema: type) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Moves the fields of `model_overrides` into `megatron_cfg`, where they mean the same and are checked.

    Args:
        config: the recipe's config, modified in place.
        schema: the schema of its algorithm.

    Returns:
        The full path in the recipe of each moved field, by its path in `megatron_cfg`; and a path with a message for
        each field that has a key of its own.
    """
    written_as: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    policy = config["policy"] if isinstance(config.get("policy"), dict) else {}
    section = policy["megatron_cfg"] if isinstance(policy.get("megatron_cfg"), dict) else {}
    fields = section.get("model_overrides")
    if not isinstance(fields, dict):  # absent, null, or reported by the schema
        return written_as, problems
    section["model_overrides"] = {}
    for name, value in fields.items():
        path, own = f"{_PATH}.{name}", f"{_SECTION}.{name}"
        if name in section or own in nemo_rl_paths() or find_key(schema, own) is not None:
            problems.append((path, f"has a key of its own, {own}; set that, and delete this one"))
        elif value is None:
            problems.append((path, "must have a value; delete it, which leaves the model's own value"))
        else:
            section[name] = value
            written_as[own] = path
    return written_as, problems
