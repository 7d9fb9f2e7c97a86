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

_PLAIN: dict[str, type] = {"bool": bool, "str": str, "dict": dict, "none": type(None)}
DTYPES = ("float32", "bfloat16", "float16")


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
            case "bool" | "str" | "dict" | "none" as plain:
                return isinstance(value, _PLAIN[plain])
            case "any":
                return True
            case "torch.dtype":
                return value in DTYPES
            case "literal":
                return any(type(value) is type(one) and value == one for one in map(ast.literal_eval, arguments))
            case "union" | "optional":
                is_null = name == "Optional" and value is None
                return is_null or any(self.accepts(argument, value) for argument in arguments)
            case "list" | "tuple" | "sequence":
                return self._accepts_items(name.lower(), arguments, value)
            case _:
                members = self.members(name)
                return self.accepts_unknown if members is None else value in members

    def _accepts_items(self, kind: str, arguments: list[ast.expr], value: Any) -> bool:
        items = [argument for argument in arguments if ast.unparse(argument) != "..."]
        if not isinstance(value, list) or not items:
            return isinstance(value, list)
        # Some libraries annotate a list of two as list[float, float].
        if len(items) > 1 or (kind == "tuple" and len(items) == len(arguments)):
            return len(value) == len(items) and all(map(self.accepts, items, value))
        return all(self.accepts(items[0], item) for item in value)

    def words(self, annotation: ast.expr) -> str:
        """Returns the type as its library writes it, with the members of enumerations."""
        text = ast.unparse(annotation).strip("'").replace("typing.", "").replace("torch.dtype", show_choices(DTYPES))
        enums = {name: found for name in re.findall(r"\w+", text) if (found := self.members(name)) is not None}
        return text + "".join(f" ({name}: {show_choices(found)})" for name, found in enums.items())


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
