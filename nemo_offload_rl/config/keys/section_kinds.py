"""Sections of several kinds, distinguished by one of their keys: `dataset_name` determines the kind of `data.train`."""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, is_typeddict

from nemo_offload_rl.config.keys.tree import alternatives, find_key, hints_of, key_comments
from nemo_offload_rl.config.problems import KEYS_ALIKE, nearest, show, show_choices

MARK = "dataset_name"


def is_kind(kind: type, section: Mapping[str, Any]) -> bool:
    """Returns whether a section is of a kind; also true if no key tells kinds apart."""
    return MARK not in kind.__annotations__ or section.get(MARK) in _marks(kind)


def _marks(kind: type) -> tuple[str, ...]:
    mark = hints_of(kind)[MARK]
    return get_args(mark) if get_origin(mark) is Literal else ()


def kind_of(root: type, section: str, value: Any) -> type | None:
    """Returns the TypedDict that a section's discriminating key selects.

    Args:
        root: the algorithm's schema.
        section: the section's path.
        value: the recipe's value at this path.

    Returns:
        The TypedDict; None for a section of one kind, or if the discriminating key is missing or wrong.
    """
    mark = value[MARK] if isinstance(value, Mapping) and MARK in value else None
    return kinds_of(root, section).get(mark) if isinstance(mark, str) else None


def kinds_of(root: type, section: str) -> dict[str, type]:
    """Returns the TypedDicts of a section by the value that selects each; empty for a section of one kind.

    Args:
        root: the algorithm's schema.
        section: the section's path, or the path of one item in a list of such sections.
    """
    before, _, last = section.rpartition(".")
    key = find_key(root, before if last.isdecimal() else section)
    if key is None:
        return {}
    kinds = [kind for kind in alternatives(key.annotation) if is_typeddict(kind) and MARK in kind.__annotations__]
    return {mark: kind for kind in kinds for mark in _marks(kind)}


def unknown_in_kind(root: type, section: str, value: Any, name: str) -> str | None:
    """Returns the message about a key that the section's kind lacks; None for a section without kinds.

    Args:
        root: the algorithm's schema.
        section: the section's path.
        value: the recipe's value at this path.
        name: the unknown key.
    """
    kind = kind_of(root, section, value)
    if kind is None:
        return None
    names = [key for key in _names(kind) if key != MARK]
    others = [mark for mark, other in kinds_of(root, section).items() if name in _names(other)]
    if others:
        return (
            f"is a key of {MARK} {show_choices(others)}, but {section}.{MARK} is {show(value[MARK])}, whose keys are "
            f"{', '.join(names)}; delete it (on the command line: ~{section}.{name})"
        )
    close = nearest(name, names, cutoff=KEYS_ALIKE)
    if close is not None:
        return f"unknown key; nearest valid key: {section}.{close}"
    return f"unknown key; {section} with {MARK} {show(value[MARK])} has {', '.join(names)}"


def _names(kind: type) -> list[str]:
    """Returns the keys of a kind: first its own, then those that every kind has."""
    return list(dict.fromkeys([*key_comments(kind), *hints_of(kind)]))
