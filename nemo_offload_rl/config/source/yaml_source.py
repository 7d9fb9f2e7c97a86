"""Reads YAML files as trees of values that know their line, and resolves `${...}` in them.

Resolves `${...}`: other keys' values, and NeMo-RL's arithmetic, in OmegaConf's grammar. OmegaConf itself stops at the
first value that it cannot resolve, and takes 0.2 s to import; this lists all of them, and needs its grammar only for
values that are no plain reference.
"""

import copy
import operator
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from nemo_offload_rl.config.problems import Origin, Problem, show, show_file
from nemo_offload_rl.storage.disk import read_regular_file

# PyYAML's C loader, if available, is five times faster.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# YAML 1.1 reads 1e-8 as text; these are YAML 1.2's forms of numbers.
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?"
    r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
)


class _RecipeLoader(_Loader):
    """A `safe_load` that reads 1e-8 as a number and a date as text."""


_RecipeLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class _RecipeDumper(yaml.SafeDumper):
    """A `safe_dump` that quotes texts that a recipe's reader would take for numbers."""


_RecipeDumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))

_TAG = "tag:yaml.org,2002:"
MAX_FILE_BYTES = 1_048_576
"""Size of the largest file that is read. The largest example has 6 KB; a chat template or a long list of layers adds a
few more."""


@dataclass
class Node:
    """Holds a value of a recipe: a scalar, a dict of nodes or a list of nodes, and where it was written."""

    value: Any
    origin: Origin

    @classmethod
    def of(cls, value: Any, origin: Origin) -> "Node":
        """Returns a plain value as a tree in which every node has this origin."""
        if isinstance(value, dict):
            return cls({str(key): cls.of(item, origin) for key, item in value.items()}, origin)
        if isinstance(value, list | tuple):
            return cls([cls.of(item, origin) for item in value], origin)
        return cls(value, origin)

    def plain(self) -> Any:
        """Returns the tree without its origins."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def origins(self, path: str = "") -> dict[str, Origin]:
        """Returns the origin of every key by its full path; items of lists are `key.0`, `key.1` ..."""
        found = {path: self.origin} if path else {}
        prefix = f"{path}." if path else ""
        if isinstance(self.value, dict):
            for key, node in self.value.items():
                found |= node.origins(f"{prefix}{key}")
        elif isinstance(self.value, list):
            for index, node in enumerate(self.value):
                found |= node.origins(f"{prefix}{index}")
        return found


def as_yaml(config: dict[str, Any]) -> str:
    """Returns a recipe's values as YAML that reads back as the same values."""
    return yaml.dump(config, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


def read_yaml(path: Path) -> tuple[Node | None, list[Problem]]:
    """Read one YAML file.

    Returns:
        The root mapping, or None if the file cannot be parsed, and the problems found. A key that appears twice keeps
        its last value.

    Raises:
        UnreadableFileError: the file is absent, not a regular file, too large, or not readable.
    """
    name = show_file(path)
    try:
        text = read_regular_file(path, MAX_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        return None, [Problem("", Origin(name), f"is not UTF-8 text (byte {error.start})")]
    loader = _RecipeLoader(text)
    try:
        root = loader.get_single_node()
        builder = _Builder(loader, name)
        if not isinstance(root, yaml.MappingNode):
            kind = "empty" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            origin = Origin(name, root and root.start_mark.line + 1)
            return None, [Problem("", origin, f"is {kind}; a recipe is a mapping of sections such as policy and data")]
        return builder.build(root, ""), builder.problems
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        where = f", column {mark.column + 1}" if mark else ""
        if mark and text[mark.index : mark.index + 1] == "\t":
            where += "; indent with blanks, not with tabs"
        return None, [Problem("", Origin(name, mark.line + 1 if mark else None), f"broken YAML: {message}{where}")]
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        return None, [Problem("", Origin(name, line), f"broken YAML: {error.reason}")]
    except RecursionError:
        return None, [Problem("", Origin(name), "broken YAML: an alias is inside the value that it refers to")]
    finally:
        loader.dispose()


class _Builder:
    """Builds `Node` trees from the YAML nodes of one file."""

    def __init__(self, loader: Any, file: str) -> None:
        self.loader = loader
        self.file = file
        self.problems: list[Problem] = []
        self._flat: set[int] = set()  # mappings whose `<<` has been expanded

    def build(self, node: Any, path: str) -> Node:
        origin = Origin(self.file, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node, path, origin), origin)
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            message = f"has the tag {node.tag}, which recipes do not support; delete it"
            self.problems.append(Problem(path, origin, message))
            return Node(None, origin)
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node, path), origin)
        return Node([self.build(item, f"{path}.{index}") for index, item in enumerate(node.value)], origin)

    def _mapping(self, node: Any, path: str) -> dict[str, Node]:
        if id(node) not in self._flat:  # otherwise its keys are mixed with those from `<<`
            self._refuse_repeated_keys(node, path)
            self._flat.add(id(node))
        self.loader.flatten_mapping(node)  # `<<: *anchor`
        mapping = {}
        for key_node, value_node in node.value:
            origin = Origin(self.file, key_node.start_mark.line + 1)
            try:
                key = self.loader.construct_object(key_node, deep=True)
            except _UNREADABLE:
                self.problems.append(Problem(path, origin, _unreadable(key_node)))
                continue
            message = wrong_key(key)
            if message is not None:
                name = key if isinstance(key, str) and key else show(key)
                self.problems.append(Problem(_join(path, name), origin, message))
                continue
            value = self.build(value_node, _join(path, key))
            if key == REPLACES_BASE and value.value is not True:
                message = f"must be true, or absent; found {show(value.plain())}"
                self.problems.append(Problem(_join(path, key), origin, message))
            mapping[key] = Node(value.value, origin)
        return mapping

    def _refuse_repeated_keys(self, node: Any, path: str) -> None:
        first_lines: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            name = str(key_node.value)
            if name in first_lines and key_node.tag != f"{_TAG}merge":
                message = f"appears twice in this section, first on line {first_lines[name]}; delete one"
                self.problems.append(Problem(_join(path, name), Origin(self.file, line), message))
            first_lines.setdefault(name, line)

    def _scalar(self, node: Any, path: str, origin: Origin) -> Any:
        # A tag such as !!int may stand before a text that has it anyway.
        if node.tag in (f"{_TAG}str", self.loader.resolve(yaml.ScalarNode, node.value, (True, False))):
            try:
                value = self.loader.construct_object(node, deep=True)
                if isinstance(value, int):
                    str(value)  # messages show it; other bases than 10 have no limit of digits until then
                return value
            except _UNREADABLE:
                pass
        self.problems.append(Problem(path, origin, _unreadable(node)))
        return None


REPLACES_BASE = "_override_"  # `_override_: true` in a section replaces everything that it inherits


def wrong_key(key: Any) -> str | None:
    """Returns what is wrong with the name of a key; None if it is valid."""
    if not isinstance(key, str):
        return f"a key must be text, found {show(key)}; put it into quotes"
    if key == "":
        return "a key must not be empty"
    if "." in key:
        return "a key must not have a dot; write the part before it as a section"
    return None


# Exceptions that PyYAML raises for a value that its tag, explicit or implied, does not allow: Python reads no integer
# of more than 4,300 digits, and `!!bool x` is not a boolean.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, ValueError)


def _unreadable(node: Any) -> str:
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    return f"{show(node.value)} cannot be read as {kind}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


# NeMo-RL's arithmetic in recipes: "${mul:${a}, 2}".
ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
ENVIRONMENT = "oc.env"  # "${oc.env:HOME}", and "${oc.env:NAME, default}"

_REFERENCE = re.compile(r"\$\{\.*[A-Za-z_]\w*(\.\w+)*\}")  # "${section.key}", which needs no parser
_TWO = re.compile(r"\$\{(\w+):(\$\{[\w.]+\}), *(\$\{[\w.]+\})\}")  # "${mul:${a}, ${b}}", likewise
MISSING = "???"


class InterpolationError(ValueError):
    """Says why a `${...}` has no value."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values that are neither sections nor lists, each with its path."""
    prefix = f"{path}." if path else ""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{prefix}{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{prefix}{index}")
    else:
        yield path, value


def written_interpolations(plain: Any) -> dict[str, str]:
    """Returns the values to resolve, by path: texts with `${`, and `???`, which marks a value that must be given."""
    return {path: text for path, text in leaves(plain) if isinstance(text, str) and ("${" in text or text == MISSING)}


class Resolver:
    """Resolves the interpolations of one recipe."""

    def __init__(self, plain: dict[str, Any], written: Mapping[str, str]) -> None:
        """Starts with no value resolved.

        Args:
            plain: the recipe's values; not changed.
            written: `written_interpolations` of it.
        """
        self._plain = plain
        self._written = written
        self._results: dict[str, Any] = {}  # by path: the value, or the error
        self._open: list[str] = []

    def resolve(self, path: str) -> Any:
        """Returns the value of a key in `written`.

        Raises:
            InterpolationError: the key has no value.
        """
        if path in self._open:
            circle = " -> ".join([*self._open[self._open.index(path) :], path])
            raise InterpolationError(f"it refers to itself ({circle})")
        if path not in self._results:
            self._open.append(path)
            try:
                self._results[path] = self._evaluate(path, self._written[path])
            except InterpolationError as error:
                self._results[path] = error
            self._open.pop()
        if isinstance(self._results[path], InterpolationError):
            raise self._results[path]
        return self._results[path]

    def resolved(self) -> dict[str, Any]:
        """Returns the recipe's values, in which those without a value are as they were written."""
        failed = {path for path, result in self._results.items() if isinstance(result, InterpolationError)}
        return self._copy(self._plain, "", failed)

    def _evaluate(self, path: str, text: str) -> Any:
        if text == MISSING:
            raise InterpolationError(f"{path} must be given a value; it is ???")
        if _REFERENCE.fullmatch(text):
            return self._refer(path, text[2:-1])
        if (two := _TWO.fullmatch(text)) and two[1] in ARITHMETIC and all(map(_REFERENCE.fullmatch, two.groups()[1:])):
            return _call(two[1], tuple(self._refer(path, one[2:-1]) for one in two.groups()[1:]))
        # OmegaConf takes 0.1 s to import.
        from omegaconf.errors import OmegaConfBaseException
        from omegaconf.grammar_visitor import GrammarVisitor

        try:
            tree = _parse(text)
        except OmegaConfBaseException as error:
            message = f"{show(text)} is not an interpolation such as ${{section.key}} ({_first_line(error)})"
            raise InterpolationError(message) from error

        visitor = GrammarVisitor(
            lambda key, memo: self._refer(path, key), lambda name, args, args_str: _call(name, args), None
        )
        try:
            return visitor.visit(tree)
        except (OmegaConfBaseException, TypeError) as error:  # such as a section used as the name of a key
            raise InterpolationError(_first_line(error)) from error

    def _refer(self, path: str, key: str) -> Any:
        """Returns the value of `key`, referred to at `path`; leading dots are relative to the section of `path`."""
        names = re.findall(r"[^.\[\]]+", key)
        dots = len(key) - len(key.lstrip("."))
        section = path.split(".")[:-dots] if dots else []
        if dots > path.count(".") + 1:
            raise InterpolationError(f"{key} lies outside of the recipe")
        node: Any = self._plain
        at = ""
        for name in [*section, *names]:
            if isinstance(node, list) and re.fullmatch(r"-?[0-9]{1,6}", name) and -len(node) <= int(name) < len(node):
                index = int(name) % len(node)
                node, name = node[index], str(index)
            elif isinstance(node, dict) and name in node:
                node = node[name]
            else:
                raise InterpolationError(f"Interpolation key {key!r} not found")
            at = f"{at}.{name}" if at else name
            if at in self._written:
                node = self.resolve(at)
        return self._copy(node, at)

    def _copy(self, node: Any, path: str, unresolved: Container[str] = ()) -> Any:
        """Returns a copy of the values at a path, in which all but the unresolved ones are resolved."""
        if path in self._written and path not in unresolved:
            return copy.deepcopy(self.resolve(path))
        if isinstance(node, dict):
            return {key: self._copy(item, _join(path, key), unresolved) for key, item in node.items()}
        if isinstance(node, list):
            return [self._copy(item, f"{path}.{index}", unresolved) for index, item in enumerate(node)]
        return node


@lru_cache(maxsize=128)
def _parse(text: str) -> Any:
    """Parses an interpolation; cached, since every recipe repeats the same few, and a warm start doubles them."""
    from omegaconf.grammar_parser import parse

    return parse(text)


def _call(name: str, args: tuple[Any, ...]) -> Any:
    if name == ENVIRONMENT:
        return _environment(args)
    if name not in ARITHMETIC:
        raise InterpolationError(f"Unsupported interpolation type {name}")
    for arg in args:
        if not isinstance(arg, int | float) or isinstance(arg, bool):
            raise InterpolationError(f"{name} takes two numbers, found {show(arg)}")
    try:
        return ARITHMETIC[name](*args)
    except (ArithmeticError, TypeError) as error:
        raise InterpolationError(f"{name} of {' and '.join(map(show, args))}: {error}") from error


def _environment(args: tuple[Any, ...]) -> Any:
    if len(args) not in (1, 2) or not isinstance(args[0], str):
        raise InterpolationError(f"{ENVIRONMENT} takes the name of a variable and, optionally, a default")
    if args[0] in os.environ:
        return os.environ[args[0]]
    if len(args) == 1:
        raise InterpolationError(f"the environment has no variable {args[0]}")
    return None if args[1] is None else str(args[1])


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
