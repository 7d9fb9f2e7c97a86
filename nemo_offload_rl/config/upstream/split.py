"""Removes the keys of NeMo-RL's other features from a recipe, and reports those that turn something on."""

import copy
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config.key_table.nemo_rl import NEMO_RL_ROWS, NEMO_RL_SECTIONS
from nemo_offload_rl.config.key_table.row import Kind, matches
from nemo_offload_rl.config.upstream.env_vars import ENV_VARS, values_as_text

# Section from which an algorithm reads further keys, or nothing at all; an empty one is a problem.
_NEVER_EMPTY = "policy.generation"


@dataclass(frozen=True)
class SplitKeys:
    """Holds a recipe without the keys of NeMo-RL's features that this package lacks, and the messages about these keys.

    Attributes:
        config: the remaining keys, which the schema checks.
        problems: (path, message) for each key that turns something on.
        notes: what the user should know about keys that were accepted without effect.
    """

    config: dict[str, Any]
    problems: list[tuple[str, str]]
    notes: list[str]


def split_upstream_keys(config: dict[str, Any]) -> SplitKeys:
    """Removes NeMo-RL's keys from a copy of a recipe, and reports those that ask for an unsupported feature."""
    split = SplitKeys(copy.deepcopy(config), [], [])
    for row in NEMO_RL_ROWS:
        if row.kind is Kind.OTHER_VALUE or (row.unless and row.unless in matches(split.config, row.unless[0])):
            continue
        for path, value in matches(split.config, row.key):
            if row.kind is Kind.OFF_ONLY and not row.allows(value):
                split.problems.append((path, row.refusal(value)))
            if row.kind is Kind.NO_EFFECT and value not in (None, {}, []):
                split.notes.append(f"{path} has no effect: {row.why}")
            _remove(split.config, path)
    for section in ENV_VARS:
        for path, values in matches(split.config, section):
            split.notes.extend(values_as_text(path, values))
    for section in NEMO_RL_SECTIONS:
        for path, value in matches(split.config, section):
            if value in ({}, None):
                _remove(split.config, path)
    if (_NEVER_EMPTY, {}) in matches(split.config, _NEVER_EMPTY):
        message = "has no key with an effect; delete the section, or add the keys that GRPO needs"
        split.problems.append((_NEVER_EMPTY, message))
        _remove(split.config, _NEVER_EMPTY)
    return split


def _remove(config: dict[str, Any], path: str) -> None:
    *sections, name = path.split(".")
    for section in sections:
        config = config[section]
    del config[name]
