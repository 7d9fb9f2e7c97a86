"""Handles what only NeMo-RL's recipes have: keys of features that this package lacks, and its durations."""

import re
from typing import Any

from nemo_offload_rl.config.key_table.row import Kind, matches
from nemo_offload_rl.config.key_table.table import NEMO_RL_ROWS, NEMO_RL_SECTIONS
from nemo_offload_rl.config.problems import show

_FORM = re.compile(r"(\d+):(\d+):(\d+):(\d+)")
_SECONDS = (86_400, 3_600, 60, 1)


def duration_s(text: str) -> int | None:
    """Returns the seconds in days:hours:minutes:seconds; None for any other text, and for a duration of 0."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    return sum(int(part) * seconds for part, seconds in zip(found.groups(), _SECONDS, strict=True)) or None


# Sections of environment variables, whose values are text: 1 and true without quotes are read as such.
ENV_VARS = ("policy.generation.vllm_cfg.env_vars", "policy.megatron_cfg.env_vars")

# Section from which an algorithm reads further keys, or nothing at all; an empty one is a problem.
_NEVER_EMPTY = "policy.generation"


def remove_upstream_keys(config: dict[str, Any]) -> tuple[list[tuple[str, str]], list[str]]:
    """Removes the keys of NeMo-RL's features that this package lacks from a recipe.

    Args:
        config: the recipe's config, modified in place.

    Returns:
        A path with a message for each key that turns something on; and what the user should know about keys that were
        accepted without effect.
    """
    problems: list[tuple[str, str]] = []
    notes: list[str] = []
    for row in NEMO_RL_ROWS:
        if row.kind is Kind.OTHER_VALUE or (row.unless and row.unless in matches(config, row.unless[0])):
            continue
        for path, value in matches(config, row.key):
            if row.kind is Kind.OFF_ONLY and not row.allows(value):
                problems.append((path, row.refusal(value)))
            if row.kind is Kind.NO_EFFECT and value not in (None, {}, []):
                notes.append(f"{path} has no effect: {row.why}")
            _remove(config, path)
    for section in ENV_VARS:
        for path, values in matches(config, section):
            for name, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, bool | int | float):
                    values[name] = show(value)
                    text = f'is read as the text "{values[name]}"; writing it in quotes means the same'
                    notes.append(f"{path}.{name} {text}")
    for section in NEMO_RL_SECTIONS:
        for path, value in matches(config, section):
            if value in ({}, None):
                _remove(config, path)
    if (_NEVER_EMPTY, {}) in matches(config, _NEVER_EMPTY):
        message = "has no key with an effect; delete the section, or add the keys that GRPO needs"
        problems.append((_NEVER_EMPTY, message))
        _remove(config, _NEVER_EMPTY)
    return problems, notes


def _remove(config: dict[str, Any], path: str) -> None:
    *sections, name = path.split(".")
    for section in sections:
        config = config[section]
    del config[name]
