"""Removes the keys of NeMo-RL's other features from a recipe, and reports those that turn something on."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config.megatron.owned_fields import same
from nemo_offload_rl.config.problems import KEYS_ALIKE, nearest, show
from nemo_offload_rl.config.upstream.env_vars import ENV_VARS, values_as_text
from nemo_offload_rl.config.upstream.features import (
    NEVER_EMPTY,
    OFF_ONLY,
    SWITCHED_OFF,
    UPSTREAM_SECTIONS,
    WITHOUT_EFFECT,
    SwitchedOff,
)


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
    """Removes the keys of the tables from a copy of a recipe, and reports those that ask for an unsupported feature."""
    split = SplitKeys(copy.deepcopy(config), [], [])
    for row in OFF_ONLY:
        if row.only_if is not None and _matches(split.config, row.only_if[0]) != [row.only_if]:
            continue
        for path, value in _matches(split.config, row.path):
            if not any(same(value, off) for off in row.off):
                split.problems.append((path, _refusal(row.feature, value, row.off, row.remedy)))
            _remove(split.config, path)
    for feature in SWITCHED_OFF:
        _split_feature(split, feature)
    for plain in WITHOUT_EFFECT:
        if plain.unless is not None and _matches(split.config, plain.unless[0]) == [plain.unless]:
            continue
        for path, value in _matches(split.config, plain.path):
            if not plain.silent and value not in (None, {}, []):
                split.notes.append(f"{path} has no effect: {plain.reason}")
            _remove(split.config, path)
    for section in ENV_VARS:
        for path, values in _matches(split.config, section):
            split.notes.extend(values_as_text(path, values))
    for path in UPSTREAM_SECTIONS:
        if _matches(split.config, path) == [(path, {})]:
            _remove(split.config, path)
    for path in NEVER_EMPTY:
        if _matches(split.config, path) == [(path, {})]:
            split.problems.append(
                (path, "has no key with an effect; delete the section, or add the keys that GRPO needs")
            )
            _remove(split.config, path)
    return split


def _refusal(feature: str, value: Any, off: tuple[Any, ...], remedy: str) -> str:
    return f"this package does not support {feature} (found {show(value)}); {remedy.format(off=show(off[0]))}"


def _split_feature(split: SplitKeys, feature: SwitchedOff) -> None:
    for path, section in _matches(split.config, feature.section):
        _remove(split.config, path)
        if section is None:
            continue
        if not isinstance(section, dict):
            split.problems.append((path, f"must be a section (a mapping), found {show(section)}"))
            continue
        for name in _names_below(section):
            if name == feature.switch:
                if not any(same(section[name], off) for off in feature.off):
                    message = _refusal(feature.feature, section[name], feature.off, feature.remedy)
                    split.problems.append((f"{path}.{name}", message))
            elif not any(name == key or name.startswith(f"{key}.") for key in feature.keys):
                close = nearest(name, (feature.switch, *feature.keys), cutoff=KEYS_ALIKE)
                suggestion = f"; nearest valid key: {path}.{close}" if close else ""
                split.problems.append((f"{path}.{name}", f"unknown key{suggestion}"))


def _names_below(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _names_below(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _matches(config: dict[str, Any], pattern: str) -> list[tuple[str, Any]]:
    """Returns the paths in the config that match a pattern with `*`, and their values."""
    found: list[tuple[str, Any]] = [("", config)]
    for part in pattern.split("."):
        found = [
            (f"{path}.{name}" if path else name, section[name])
            for path, section in found
            if isinstance(section, dict)
            for name in (list(section) if part == "*" else [part])
            if name in section
        ]
    return found


def _remove(config: dict[str, Any], path: str) -> None:
    *sections, name = path.split(".")
    for section in sections:
        config = config[section]
    del config[name]
