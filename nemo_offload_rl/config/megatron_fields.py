"""Names and types of Megatron's own config fields, read from the installed source without importing it.

Importing megatron.core takes seconds and needs torch; its dataclasses parse in 0.05 s.
"""

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.problems import show, show_choices


@dataclass(frozen=True)
class _Source:
    """Where the fields of a section are declared: files below the `megatron` folder, and dataclasses in them."""

    title: str
    classes: tuple[tuple[str, str], ...]


# Later classes win, as they do in Python's inheritance.
SECTIONS: dict[str, _Source] = {
    "policy.megatron_cfg": _Source(
        "megatron-core's TransformerConfig",
        (
            ("core/model_parallel_config.py", "ModelParallelConfig"),
            ("core/transformer/transformer_config.py", "TransformerConfig"),
            ("core/transformer/transformer_config.py", "MLATransformerConfig"),
            ("bridge/models/gpt_provider.py", "GPTModelProvider"),
        ),
    ),
    "policy.megatron_cfg.optimizer": _Source(
        "megatron-core's OptimizerConfig", (("core/optimizer/optimizer_config.py", "OptimizerConfig"),)
    ),
    "policy.megatron_cfg.distributed_data_parallel_config": _Source(
        "megatron-core's DistributedDataParallelConfig",
        (("core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    ),
}
_ENUMS = "core/transformer/enums.py"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class MegatronField:
    """One field of a Megatron config: its annotation, and whether its default is None whatever the annotation says."""

    name: str
    annotation: ast.expr
    nullable: bool

    def accepts(self, value: Any) -> bool:
        """Whether a YAML value is of the field's type."""
        return (value is None and self.nullable) or _accepts(self.annotation, value)

    def expected(self) -> str:
        """The field's type in words; empty where no YAML value has it."""
        words = _words(self.annotation)
        if self.nullable and words:
            words.append("null")
        return " or ".join(dict.fromkeys(words))


@cache
def megatron_fields(section: str) -> dict[str, MegatronField]:
    """The fields of the Megatron config that a section of `policy` stands for (a key of `SECTIONS`), by name."""
    fields = {}
    for file, class_name in SECTIONS[section].classes:
        for statement in _class_body(file, class_name):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                default_is_none = isinstance(statement.value, ast.Constant) and statement.value.value is None
                if not name.startswith("_"):
                    fields[name] = MegatronField(name, statement.annotation, default_is_none)
    return fields


def check_field(section: str, name: str, value: Any) -> str | None:
    """What is wrong with the value of a known field; None where nothing is."""
    field = megatron_fields(section)[name]
    if field.accepts(value):
        return None
    expected = field.expected()
    if not expected:
        return f"cannot be set in a recipe: in {SECTIONS[section].title} it is no plain value"
    quoted = "; write it without quotes" if isinstance(value, str) and is_number(value) else ""
    return f"must be {expected}, as {SECTIONS[section].title} says; found {show(value)}{quoted}"


def is_number(text: str) -> bool:
    """Whether text reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


@cache
def _megatron_root() -> Path:
    spec = importlib.util.find_spec("megatron")  # a namespace package: finding it imports nothing
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _ENUMS).is_file():
            return Path(folder)
    raise ValueError(
        "megatron-core is not installed in this environment, so Megatron's keys cannot be checked; run make setup"
    )


@cache
def _module(file: str) -> ast.Module:
    return ast.parse((_megatron_root() / file).read_text(encoding="utf-8"))


def _class_body(file: str, class_name: str) -> list[ast.stmt]:
    for statement in _module(file).body:
        if isinstance(statement, ast.ClassDef) and statement.name == class_name:
            return statement.body
    raise AssertionError(f"{file} of the installed Megatron has no class {class_name}")


@cache
def _enum_members(class_name: str) -> tuple[str, ...] | None:
    for statement in _module(_ENUMS).body:
        if isinstance(statement, ast.ClassDef) and statement.name == class_name:
            targets = [item.targets[0] for item in statement.body if isinstance(item, ast.Assign)]
            return tuple(target.id for target in targets if isinstance(target, ast.Name))
    return None


def _parts(annotation: ast.expr) -> tuple[str, list[ast.expr]]:
    """Name and arguments of an annotation: Optional[int] is ("Optional", [int])."""
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


def _accepts(annotation: ast.expr, value: Any) -> bool:
    name, arguments = _parts(annotation)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    match name.lower():
        case "int":
            return is_int
        case "float":
            return is_int or isinstance(value, float)
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
            return (name == "Optional" and value is None) or any(_accepts(argument, value) for argument in arguments)
        case "list" | "tuple":
            items = [argument for argument in arguments if not _is_ellipsis(argument)]
            if not isinstance(value, list) or not items:
                return isinstance(value, list)
            if name.lower() == "tuple" and len(items) == len(arguments):
                return len(value) == len(items) and all(map(_accepts, items, value))
            return all(_accepts(items[0], item) for item in value)
        case "dict":
            return isinstance(value, dict)
        case _:
            return value in (_enum_members(name) or ())


def _is_ellipsis(annotation: ast.expr) -> bool:
    return isinstance(annotation, ast.Constant) and annotation.value is ...


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


def _words(annotation: ast.expr) -> list[str]:
    name, arguments = _parts(annotation)
    kind = name.lower()
    if kind in _PLAIN_WORDS:
        return [_PLAIN_WORDS[kind]]
    if kind == "torch.dtype":
        return [show_choices(DTYPES)]
    if kind == "literal":
        return [show_choices(_literals(arguments))]
    if kind in ("union", "optional"):
        words = [word for argument in arguments for word in _words(argument)]
        return [*words, "null"] if kind == "optional" and words else words
    if kind in ("list", "tuple"):
        inner = [word for argument in arguments if not _is_ellipsis(argument) for word in _words(argument)]
        items = dict.fromkeys(_PLURALS[word] if word in _PLURALS else word for word in inner)
        return [f"a list of {' or '.join(items)}" if items else "a list"]
    members = _enum_members(name)
    return [show_choices(members)] if members else []
