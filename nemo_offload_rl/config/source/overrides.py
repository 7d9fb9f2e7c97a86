"""Applies command-line overrides in Hydra's grammar to a recipe's tree."""

from collections.abc import Callable, Sequence
from typing import Any

from nemo_offload_rl.config.problems import Origin, Problem, nearest_path, show
from nemo_offload_rl.config.source.yaml_source import REPLACES_BASE, Node, wrong_key

SectionOf = Callable[[str, Any], dict[str, Any] | None]
"""Maps a path and its value to the section that the value stands for, or to None."""


def apply_overrides(
    root: Node,
    overrides: Sequence[str],
    is_known: Callable[[str], bool],
    section_of: SectionOf,
    given_in: Sequence[str] | None = None,
) -> list[Problem]:
    """Applies overrides in order, modifying the tree in place.

    Args:
        root: the recipe.
        overrides: `a.b=1` changes a key, `+a.b=1` adds one, `++a.b=1` does either, `~a.b` deletes one.
        is_known: whether a path is a valid key, even where the recipe does not set it.
        section_of: returns the section that a value such as auto stands for, so that overrides can change its keys.
        given_in: where each override is written; None for the command line.

    Returns:
        The overrides that could not be applied.
    """
    if not overrides:
        return []
    # Hydra's grammar takes 0.15 s to import.
    from nemo_offload_rl.config.source.override_grammar import OverrideSyntaxError, parse_override

    problems: list[Problem] = []
    places: Sequence[str | None] = [None] * len(overrides) if given_in is None else given_in
    for text, place in zip(overrides, places, strict=True):
        origin = Origin(file=place, override=text)
        path = ""
        try:
            override = parse_override(text)
        except OverrideSyntaxError as error:
            message: str | None = str(error)
        else:
            path = override.key_or_group
            _write_out(root, path, section_of)
            message = _apply(root, override, origin, is_known, section_of)
        if message:
            problems.append(Problem(path, origin, message))
    return problems


def _write_out(root: Node, path: str, section_of: SectionOf) -> None:
    """Replaces a value that stands for a section by that section if the path leads into it."""
    node = root
    sections = path.split(".")[:-1]
    for depth, name in enumerate(sections, start=1):
        if not isinstance(node.value, dict) or name not in node.value:
            return
        old = node.value[name]
        section = section_of(".".join(sections[:depth]), old.value)
        if section is not None:
            node.value[name] = Node.of(section, old.origin)
        node = node.value[name]


def _apply(
    root: Node, override: Any, origin: Origin, is_known: Callable[[str], bool], section_of: SectionOf
) -> str | None:
    """Applies one override; returns a message if that is not possible."""
    path: str = override.key_or_group
    if override.package is not None or "/" in path:
        return "names a config group; a recipe has none, write section.key=value"
    if override.is_sweep_override():
        return "is a sweep over several values; a run takes one (quote the value if it is text)"
    *sections, name = path.split(".")
    if not all([*sections, name]):
        return "has an empty key; write section.key=value"
    if override.is_delete():
        return _delete(root, sections, name, override)
    value = override.value()
    message = _wrong_value(value, path)
    if message is not None:
        return message
    if name == REPLACES_BASE:
        return f"cannot be set by itself; write {'.'.join(sections) or 'section'}={{{REPLACES_BASE}: true, ...}}"
    adds = override.is_add() or override.is_force_add()
    parent = _section(root, sections, origin if adds else None)
    if parent is not None and not isinstance(parent.value, dict):
        what = f"null; write +{path}=... to make it a section" if parent.value is None else "not a section"
        return f"cannot be set: {'.'.join(sections)} is {what}"
    if parent is None or (name not in parent.value and not adds):
        known = f"is a valid key that this recipe does not set; write +{path}=... to add it"
        return known if is_known(path) else _no_such_key(root, path)
    if override.is_add() and name in parent.value and parent.value[name].value is not None:
        return f"is already set; write {path}=... to change it, or ++{path}=..."
    new = Node.of(value, origin)
    old = parent.value[name] if name in parent.value else Node(None, origin)
    if section_of(path, value) is not None:
        undone = next((at.override for at in old.origins().values() if at.override and at != old.origin), None)
        if undone is not None:
            return f"replaces the whole section, which would undo {undone}; write it before that"
    parent.value[name] = merge(old, new)
    return None


def _delete(root: Node, sections: list[str], name: str, override: Any) -> str | None:
    parent = _section(root, sections)
    path = override.key_or_group
    if parent is None or not isinstance(parent.value, dict) or name not in parent.value:
        return f"cannot be deleted: {_no_such_key(root, path)}"
    value = override.value()
    if value is not None and value != parent.value[name].plain():
        return f"cannot be deleted: its value is {show(parent.value[name].plain())}, not {show(value)}"
    del parent.value[name]
    return None


def _wrong_value(value: Any, path: str) -> str | None:
    """Returns what an override's value contains that a recipe must not contain."""
    if isinstance(value, dict):
        for key, item in value.items():
            message = wrong_key(key)
            if message is not None:
                return f"{path}: {message}"
            if key == REPLACES_BASE and item is not True:
                return f"{path}.{key}: must be true, or absent; found {show(item)}"
            message = _wrong_value(item, f"{path}.{key}")
            if message is not None:
                return message
    elif isinstance(value, list):
        return next((message for item in value if (message := _wrong_value(item, path)) is not None), None)
    elif not isinstance(value, str | int | float | None):
        return f"has a {type(value).__name__} inside; a recipe has text, numbers, true, false and null"
    return None


def _section(root: Node, sections: list[str], added: Origin | None = None) -> Node | None:
    """Returns the section's node, or a value on the way that is no section; None if one is missing and none is added.

    Args:
        root: the recipe.
        sections: the names that lead to the section.
        added: the origin of sections to add where they are missing or null; None to add none.
    """
    node = root
    for name in sections:
        if not isinstance(node.value, dict):
            break
        if name not in node.value and added is None:
            return None
        if added is not None and (name not in node.value or node.value[name].value is None):  # as in Hydra
            node.value[name] = Node({}, added)
        node = node.value[name]
    return node


def _no_such_key(root: Node, path: str) -> str:
    suggestion = nearest_path(path, root.origins())
    return "the recipe has no such key" + (f"; nearest key: {suggestion}" if suggestion else "")


def merge(base: Node, over: Node) -> Node:
    """Returns the base with the values of `over`: mappings are merged key by key, everything else is replaced.

    A mapping with `_override_: true` replaces the whole base, as in NeMo-RL.
    """
    if not isinstance(over.value, dict):
        return over
    items = dict(over.value)
    replaces = REPLACES_BASE in items and items.pop(REPLACES_BASE).value is True
    merged = dict(base.value) if isinstance(base.value, dict) and not replaces else {}
    for key, node in items.items():
        merged[key] = merge(merged[key], node) if key in merged else merge(Node(None, node.origin), node)
    return Node(merged, over.origin)
