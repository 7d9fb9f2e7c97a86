"""Type annotations in another library's source: checks YAML values against them, and describes them in words."""

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config.problems import show_choices

# A class up to its first method: its fields come first, and parsing all methods takes several times as long.
_FIELDS = r"^class {}\b.*?(?=^    (?:async |def |@)|^(?:async |def |class |@)|\Z)"

DTYPES = ("float32", "bfloat16", "float16")

_PLAIN_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "none": "null",
    "any": "any value",
    "dict": "a mapping",
}
_PLURALS = {"an integer": "integers", "a number": "numbers", "text": "texts", "a mapping": "mappings"}


@dataclass(frozen=True)
class Annotations:
    """Reads the type annotations of one library.

    Attributes:
        members: maps the name of an enumeration to the names of its members, and any other name to None.
        accepts_unknown: whether a type that is neither plain nor an enumeration accepts any value, or none.
        finite: whether a number has to be finite.
    """

    members: Callable[[str], tuple[str, ...] | None]
    accepts_unknown: bool = False
    finite: bool = False

    def accepts(self, annotation: ast.expr, value: Any) -> bool:
        """Returns whether a YAML value is of the type; integers also count as numbers, and lists as tuples."""
        name, arguments = _parts(annotation)
        is_int = isinstance(value, int) and not isinstance(value, bool)
        match name.lower():
            case "int":
                return is_int
            case "float":
                return is_int or (isinstance(value, float) and (math.isfinite(value) or not self.finite))
            case "bool":
                return isinstance(value, bool)
            case "str":
                return isinstance(value, str)
            case "none":
                return value is None
            case "any":
                return True
            case "torch.dtype":
                return value in DTYPES
            case "literal":
                return any(type(value) is type(choice) and value == choice for choice in _literals(arguments))
            case "union" | "optional":
                is_null = name == "Optional" and value is None
                return is_null or any(self.accepts(argument, value) for argument in arguments)
            case "list" | "tuple" | "sequence":
                return self._accepts_items(name.lower(), arguments, value)
            case "dict":
                return isinstance(value, dict)
            case _:
                members = self.members(name)
                return self.accepts_unknown if members is None else value in members

    def _accepts_items(self, kind: str, arguments: list[ast.expr], value: Any) -> bool:
        items = [argument for argument in arguments if not _is_ellipsis(argument)]
        if not isinstance(value, list) or not items:
            return isinstance(value, list)
        # Some libraries annotate a list of two as list[float, float].
        if len(items) > 1 or (kind == "tuple" and len(items) == len(arguments)):
            return len(value) == len(items) and all(map(self.accepts, items, value))
        return all(self.accepts(items[0], item) for item in value)

    def words(self, annotation: ast.expr) -> list[str]:
        """Returns the type in words, one entry for each member of a union; leaves out types that no YAML value has."""
        name, arguments = _parts(annotation)
        kind = name.lower()
        if kind in _PLAIN_WORDS:
            return [_PLAIN_WORDS[kind]]
        if kind == "torch.dtype":
            return [show_choices(DTYPES)]
        if kind == "literal":
            return [show_choices(_literals(arguments))]
        if kind in ("union", "optional"):
            words = [word for argument in arguments for word in self.words(argument)]
            return [*words, "null"] if kind == "optional" and words else words
        if kind in ("list", "tuple", "sequence"):
            inner = [word for argument in arguments if not _is_ellipsis(argument) for word in self.words(argument)]
            items = dict.fromkeys(_PLURALS[word] if word in _PLURALS else word for word in inner)
            return [f"a list of {' or '.join(items)}" if items else "a list"]
        members = self.members(name)
        return [show_choices(members)] if members else []


def fields_of(source: str, class_name: str) -> ast.ClassDef | None:
    """Returns a class without its methods from a module's source; None if the module does not define it."""
    found = re.search(_FIELDS.format(class_name), source, re.MULTILINE | re.DOTALL)
    definition = None if found is None else ast.parse(found[0]).body[0]
    assert definition is None or isinstance(definition, ast.ClassDef)
    return definition


def annotated(definition: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    """Returns the fields that a class declares, by name, without private ones and class variables."""
    return {
        statement.target.id: statement
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not statement.target.id.startswith("_")
        and not ast.unparse(statement.annotation).startswith("ClassVar")
    }


def declared_choices(annotation: ast.expr) -> tuple[Any, ...] | None:
    """Returns the values of a Literal, or of an Optional of one; None for any other annotation."""
    name, arguments = _parts(annotation)
    if name == "Literal":
        return tuple(_literals(arguments))
    return declared_choices(arguments[0]) if name == "Optional" else None


def _parts(annotation: ast.expr) -> tuple[str, list[ast.expr]]:
    """Splits an annotation into name and arguments: Optional[int] becomes ("Optional", [int])."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _parts(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Constant):
        return "None", []
    if isinstance(annotation, ast.BinOp):
        return "Union", [annotation.left, annotation.right]
    if isinstance(annotation, ast.Subscript):
        arguments = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return ast.unparse(annotation.value).removeprefix("typing."), list(arguments)
    return ast.unparse(annotation), []


def _literals(arguments: list[ast.expr]) -> list[Any]:
    return [ast.literal_eval(argument) for argument in arguments]


def _is_ellipsis(annotation: ast.expr) -> bool:
    return isinstance(annotation, ast.Constant) and annotation.value is ...
