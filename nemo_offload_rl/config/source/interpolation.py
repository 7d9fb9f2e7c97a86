"""Resolves `${...}`: other keys' values, and NeMo-RL's arithmetic, in OmegaConf's grammar.

OmegaConf itself stops at the first value that it cannot resolve, and takes 0.2 s to import; this lists all of them, and
needs its grammar only for values that are no plain reference.
"""

import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from nemo_offload_rl.config.problems import show

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
_MISSING = "???"


class InterpolationError(ValueError):
    """Says that a `${...}` has no value, in words for a key that refers to this one.

    Attributes:
        message: the same in words that continue the name of its own key; empty until that is known.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(reason)
        self.message = message


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
    return {path: text for path, text in leaves(plain) if isinstance(text, str) and ("${" in text or text == _MISSING)}


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
        self._resolved: dict[str, Any] = {}
        self._failed: dict[str, InterpolationError] = {}
        self._open: list[str] = []

    def resolve(self, path: str) -> Any:
        """Returns the value of a key in `written`.

        Raises:
            InterpolationError: the key has no value.
        """
        if path in self._failed:
            raise self._failed[path]
        if path not in self._resolved:
            text = self._written[path]
            self._open.append(path)
            try:
                self._resolved[path] = self._evaluate(path, text)
            except InterpolationError as error:
                message = error.message or f"{show(text)} cannot be resolved: {error}"
                self._failed[path] = InterpolationError(str(error), message)
                raise self._failed[path] from error
            finally:
                self._open.pop()
        return self._resolved[path]

    def _evaluate(self, path: str, text: str) -> Any:
        if text == _MISSING:
            raise InterpolationError(f"{path} is ???", "must be given a value; it is ???")
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
            raise InterpolationError(f"{path} is not an interpolation", message) from error

        def call(name: str, args: tuple[Any, ...], args_str: tuple[str, ...]) -> Any:
            return _call(name, args)

        visitor = GrammarVisitor(lambda key, memo: self._refer(path, key), call, None)
        try:
            value = visitor.visit(tree)
        except (OmegaConfBaseException, TypeError) as error:  # such as a section used as the name of a key
            raise InterpolationError(f"{_first_line(error)}") from error
        return value

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
            if at in self._written and isinstance(node, str):
                node = self._named(at)
        return self._copy(node, at)

    def _named(self, path: str) -> Any:
        """Returns the value of a key in `written` for a key that refers to it."""
        if path in self._open:
            circle = " -> ".join([*self._open[self._open.index(path) :], path])
            raise InterpolationError(f"it refers to itself ({circle})")
        try:
            return self.resolve(path)
        except InterpolationError as error:
            raise InterpolationError(str(error)) from error

    def _copy(self, node: Any, path: str | None) -> Any:
        """Returns a copy with everything in it resolved; `path` is None if the node is already resolved."""
        if path is not None and isinstance(node, str) and self._written.get(path) == node:
            return self._copy(self._named(path), None)
        if isinstance(node, dict):
            return {key: self._copy(item, path and f"{path}.{key}") for key, item in node.items()}
        if isinstance(node, list):
            return [self._copy(item, path and f"{path}.{index}") for index, item in enumerate(node)]
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
    if len(args) != 2:
        raise InterpolationError(f"{name} expected 2 arguments, got {len(args)}")
    for arg in args:
        if not isinstance(arg, int | float) or isinstance(arg, bool):
            raise InterpolationError(f"{name} takes two numbers, found {show(arg)}")
    try:
        return ARITHMETIC[name](*args)
    except ArithmeticError as error:
        raise InterpolationError(f"{name} of {show(args[0])} and {show(args[1])}: {error}") from error


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
