"""Reads a recipe: YAML with `defaults:` inheritance, command-line overrides and `${...}` interpolation."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.keys.schema_problems import ABSENT, value_at
from nemo_offload_rl.config.keys.tree import is_valid_key, section_of_auto
from nemo_offload_rl.config.problems import MAX_PROBLEMS, Origin, Problem, RecipeError, nearest, show, show_file
from nemo_offload_rl.config.source.overrides import apply_overrides, merge
from nemo_offload_rl.config.source.yaml_source import (
    MISSING,
    InterpolationError,
    Node,
    Resolver,
    read_yaml,
    written_interpolations,
)
from nemo_offload_rl.storage.disk import UnreadableFileError

# ${section.key} and ${.sibling}; \${...} is plain text.
_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{(\.*)([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True)
class Recipe:
    """Holds a recipe after inheritance, overrides and interpolation, before it is checked against the schema.

    Attributes:
        path: the recipe's file.
        config: the resolved values.
        origins: where each key was written, by its full path.
        written: the text, such as `${...}`, of each value that was interpolated, by its full path.
        problems: mistakes despite which the rest of the recipe could be read.
    """

    path: Path
    config: dict[str, Any]
    origins: dict[str, Origin]
    written: dict[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def origin(self, path: str) -> Origin:
        """Returns where a key was written, or where the nearest enclosing section was."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return Origin(show_file(self.path))

    def own_settings(self) -> list[tuple[str, Any, str]]:
        """Returns key, value and place of what overrides and the recipe's own file set, not of what it inherits."""
        values = {path: value_at(self.config, path) for path in self.origins}
        lists = tuple(f"{path}." for path, value in values.items() if isinstance(value, list))
        own, here = [], show_file(self.path)
        for path, origin in sorted(self.origins.items(), key=lambda item: item[1].override is None):
            is_section = values[path] is ABSENT or (isinstance(values[path], dict) and values[path])
            if (origin.override is not None or origin.file == here) and not is_section and not path.startswith(lists):
                own.append((path, values[path], str(origin)))
        return own

    def sources(self, path: str) -> list[str]:
        """Returns the keys that a value was interpolated from."""
        if path not in self.written:
            return []
        sources = []
        for dots, name in _REFERENCE.findall(self.written[path]):
            section = path.split(".")[: -len(dots)] if dots else []
            sources.append(".".join([*section, name]))
        return sources


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: the YAML file.
        overrides: command-line overrides, applied after inheritance and before interpolation.

    Raises:
        RecipeError: lists every mistake; the schema is not checked yet (see `validate`).
    """
    recipe = read_recipe(path, overrides)
    if recipe.problems:
        raise RecipeError(show_file(recipe.path), recipe.problems)
    return recipe


def read_recipe(path: str | Path, overrides: Sequence[str] = (), given_in: Sequence[str] | None = None) -> Recipe:
    """Reads a recipe as `load_recipe` does, but returns mistakes that leave the rest readable in `problems`.

    Args:
        path: the YAML file.
        overrides: as `load_recipe`.
        given_in: where each override is written; None for the command line.
    """
    path = Path(path)
    problems: list[Problem] = []
    root = _Inheritance(problems).read(path)
    if root is None:
        raise RecipeError(show_file(path), problems)
    problems += apply_overrides(root, overrides, is_valid_key, section_of_auto, given_in)
    config, written, unresolved = _resolve(root)
    return Recipe(path, config, root.origins(), written, (*problems, *unresolved))


class _Inheritance:
    """Reads a recipe's files, each once, and merges them."""

    def __init__(self, problems: list[Problem]) -> None:
        self._problems = problems
        self._merged: dict[tuple[str, str], Node | None] = {}

    def read(self, path: Path, chain: tuple[Path, ...] = (), named_at: Origin | None = None) -> Node | None:
        """Returns the file merged over the files in its `defaults`; None if one of them cannot be read.

        Args:
            path: the file's path.
            chain: the files whose `defaults` led to this one.
            named_at: where the file's name is written; None if it comes from the command line.
        """
        if os.path.realpath(path) in [os.path.realpath(link) for link in chain]:
            cycle = " -> ".join(link.name for link in (*chain, path))
            self._problems.append(Problem("defaults", named_at, f"the recipe inherits from itself: {cycle}"))
            return None
        # The `defaults` of a symbolic link are relative to the folder of the link.
        key = (os.path.realpath(path.parent), path.name)
        if key not in self._merged:
            self._merged[key] = None
            self._merged[key] = self._merge(path, chain, named_at)
        return self._merged[key]

    def _merge(self, path: Path, chain: tuple[Path, ...], named_at: Origin | None) -> Node | None:
        try:
            root, found = read_yaml(path)
        except UnreadableFileError as error:
            self._problems.append(_unreadable(path, error, named_at))
            return None
        self._problems += found
        if root is None:
            return None
        defaults = root.value.pop("defaults", None)
        parents = _parents(defaults, self._problems) if defaults is not None else []
        bases = [self.read(path.parent / name, (*chain, path), origin) for name, origin in parents]
        merged = Node({}, root.origin)
        for base in bases:
            if base is None:
                return None
            merged = merge(merged, base)
        return merge(merged, root)


def _unreadable(path: Path, error: UnreadableFileError, named_at: Origin | None) -> Problem:
    reason = "there is no such recipe" if error.is_absent else str(error).replace("not a file", "not a recipe")
    if named_at is not None:
        rule = "; a path is relative to the folder of the recipe that names it" if error.is_absent else ""
        return Problem("defaults", named_at, f"names {show_file(path)}, but {reason}{rule}")
    near = nearest(path.name, [item.name for item in path.parent.glob("*.yaml")]) if error.is_absent else None
    suggestion = f"; did you mean {show_file(path.parent / near)}?" if near else ""
    return Problem("", Origin(show_file(path)), f"{reason}{suggestion}")


def _parents(defaults: Node, problems: list[Problem]) -> list[tuple[str, Origin]]:
    nodes = defaults.value if isinstance(defaults.value, list) else [defaults]
    parents = []
    for node in nodes:
        if isinstance(node.value, str) and node.value and "\0" not in node.value:
            parents.append((node.value, node.origin))
        else:
            message = f"must be the name of a recipe, or a list of such names; found {show(node.plain())}"
            problems.append(Problem("defaults", node.origin, message))
    return parents


def _resolve(root: Node) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Resolves every `${...}`: returns the plain values, the original texts, and the problems."""
    plain = root.plain()
    origins = root.origins()
    problems: list[Problem] = []
    written = written_interpolations(plain)
    resolver = Resolver(plain, written)
    for path, text in written.items():
        try:
            resolver.resolve(path)
        except InterpolationError as error:
            why = "must be given a value; it is ???" if text == MISSING else f"{show(text)} cannot be resolved: {error}"
            problems.append(Problem(path, origins[path], why))
    return resolver.resolved(), written, problems[: MAX_PROBLEMS + 1]
