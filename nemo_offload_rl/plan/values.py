"""Reads and replaces values of a recipe by the paths of their keys."""

from collections.abc import Mapping
from typing import Any, cast

from nemo_offload_rl.config.schema import MasterConfig

Values = Mapping[str, Any]
"""Values of a recipe by the paths of their keys."""


def with_values(config: MasterConfig, values: Values) -> MasterConfig:
    """Returns a config with other values; what does not change is shared with the given one."""
    changed: Any = dict(config)
    for key, value in values.items():
        section, (*sections, name) = changed, key.split(".")
        for part in sections:
            section[part] = dict(section.get(part) or {})
            section = section[part]
        section[name] = value
    return cast(MasterConfig, changed)


def value_at(config: MasterConfig, key: str) -> Any:
    """Returns the value at a key's path; None where the recipe does not have the key."""
    found: Any = config
    for part in key.split("."):
        found = (found or {}).get(part)
    return found
