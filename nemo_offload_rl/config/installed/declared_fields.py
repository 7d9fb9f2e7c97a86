"""Reads versions, fields and arguments of megatron-core, Megatron-Bridge and vLLM without importing any of them.

Names and types of Megatron's own config fields, read from the installed source without importing it. Importing
megatron.core takes seconds and needs torch; its dataclasses parse in 0.05 s.

Names and types of vLLM's engine arguments, read from the installed source without importing it. Importing vLLM takes
many seconds and needs a GPU's libraries; its arguments are one dataclass.
"""

import ast
import importlib.util
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.problems import KEYS_ALIKE, is_number, nearest, show, show_choices

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


# Versions of megatron-core that activation offloading was tested with: the calls of its layers to the manager of
# activations are not a public interface.
TESTED_MEGATRON_CORE = ("0.19.2",)


def untested_megatron_core() -> str | None:
    """Returns why activations cannot be offloaded with the installed megatron-core; None if they can."""
    import importlib.metadata  # takes 0.03 s

    try:
        # Its own __version__ ends in a commit of the folder that the process runs in.
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    if found in TESTED_MEGATRON_CORE:
        return None
    return (
        f"replaces a private part of megatron-core and was tested only with {', '.join(TESTED_MEGATRON_CORE)}, "
        f"but {found} is installed; install a tested version, or set the key to false"
    )


@dataclass(frozen=True)
class _Source:
    """Names the source of a section's fields: files below the `megatron` folder, and dataclasses in them."""

    title: str
    classes: tuple[tuple[str, str], ...]


# If a field is in several classes, the last one wins, as in Python's inheritance.
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

# Fields that megatron-core annotates as text but reads as one of a few words; it silently treats other words as none.
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "policy.megatron_cfg": {
        "moe_router_load_balancing_type": (
            *("aux_loss", "seq_aux_loss", "global_aux_loss"),
            *("sinkhorn", "quantile_balancing", "none"),
        ),
        "rope_type": ("rope", "yarn"),
    },
    "policy.megatron_cfg.optimizer": {},
    "policy.megatron_cfg.distributed_data_parallel_config": {
        "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    },
}


@dataclass(frozen=True)
class MegatronField:
    """Describes a field of a Megatron config, as its source declares it.

    Attributes:
        annotation: the field's type.
        nullable: whether its default is None, even if the annotation does not allow it.
        may_be_infinite: whether its default is infinite, and so means "no bound".
        choices: the words allowed for a text, or for each text of a list; None for any.
    """

    annotation: ast.expr
    nullable: bool
    may_be_infinite: bool = False
    choices: tuple[str, ...] | None = None

    def accepts(self, value: Any) -> bool:
        """Returns whether a YAML value is of the field's type."""
        if value is None and self.nullable:
            return True
        if self.may_be_infinite and value == math.inf:
            return True
        if self.choices is not None and value is not None:
            words = value if isinstance(value, list) else [value]
            if not words or any(word not in self.choices for word in words):
                return False
        return _ANNOTATIONS.accepts(self.annotation, value)


@cache
def megatron_fields(section: str) -> dict[str, MegatronField]:
    """Returns the fields of the Megatron config behind a section of `policy`, a key of `SECTIONS`."""
    fields: dict[str, MegatronField] = {}
    for file, class_name in SECTIONS[section].classes:
        definition = fields_of(_source(file), class_name)
        assert definition is not None, f"{file} of the installed Megatron has no class {class_name}"
        for name, statement in annotated(definition).items():
            fields[name] = _field(section, name, statement, fields[name] if name in fields else None)
    return fields


def _field(section: str, name: str, declared: ast.AnnAssign, inherited: MegatronField | None) -> MegatronField:
    annotation = declared.annotation
    if ast.unparse(annotation) == "str" and inherited is not None and "Literal" in ast.unparse(inherited.annotation):
        # A subclass that changes the default may annotate text where its base lists the words.
        annotation = inherited.annotation
    return MegatronField(
        annotation,
        nullable=isinstance(declared.value, ast.Constant) and declared.value.value is None,
        may_be_infinite=declared.value is not None and ast.unparse(declared.value) == "float('inf')",
        choices=CHOICES[section].get(name),
    )


def check_field(section: str, name: str, value: Any) -> str | None:
    """Returns what is wrong with the value of a known field; None if it is valid."""
    field = megatron_fields(section)[name]
    if field.accepts(value):
        return None
    expected = _ANNOTATIONS.words(field.annotation) if field.choices is None else show_choices(field.choices)
    if "Callable" in expected:
        return f"cannot be set in a recipe: it is a function in {SECTIONS[section].title}"
    hint = "; write it without quotes" if isinstance(value, str) and is_number(value) else ""
    if field.choices is not None and isinstance(value, str) and (close := nearest(value, field.choices)):
        hint = f"; did you mean {close}?"
    return f"must be {expected}, as {SECTIONS[section].title} says; found {show(value)}{hint}"


@cache
def megatron_root() -> Path:
    """Returns the folder of the installed Megatron: megatron-core and Megatron-Bridge.

    Raises:
        ValueError: megatron-core is not installed.
    """
    spec = importlib.util.find_spec("megatron")  # a namespace package: finding it imports nothing
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _ENUMS).is_file():
            return Path(folder)
    raise ValueError(
        "megatron-core is not installed in this environment, so Megatron's keys cannot be checked; run make setup"
    )


@cache
def _source(file: str) -> str:
    return (megatron_root() / file).read_text(encoding="utf-8")


@cache
def _enum_members(class_name: str) -> tuple[str, ...] | None:
    definition = fields_of(_source(_ENUMS), class_name)
    if definition is None:
        return None
    targets = [item.targets[0] for item in definition.body if isinstance(item, ast.Assign)]
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


_ANNOTATIONS = Annotations(_enum_members, finite=True)


_BRIDGES = "bridge/models"
_CALL = re.compile(r"register_bridge\(\s*source=([\w\"']+)")


@cache
def bridged_architectures() -> frozenset[str]:
    """Returns the transformers classes for which Megatron-Bridge registers a bridge."""
    return frozenset(
        name
        for path in sorted((megatron_root() / _BRIDGES).rglob("*_bridge.py"))
        for name in _in(path.read_text(encoding="utf-8"))
    )


def _in(source: str) -> Iterator[str]:
    for found in _CALL.finditer(source):
        name = found[1]
        if name.startswith(("'", '"')):
            yield name.strip("'\"")
            continue
        constant = re.search(rf"^{name}\s*=\s*(\"\w+\"|'\w+')", source, re.MULTILINE)
        yield ast.literal_eval(constant[1]) if constant is not None else name


_FILE, _CLASS = "engine/arg_utils.py", "EngineArgs"
# vLLM's own types, such as its configs and literals with a name, are left to vLLM.
_VLLM_ANNOTATIONS = Annotations(members=lambda name: None, accepts_unknown=True)


def source_folder() -> Path | None:
    """Returns the folder of the installed vLLM; None if there is none."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


@cache
def declared_arguments(folder: Path) -> Mapping[str, ast.expr]:
    """Returns the type of each argument by name; empty if this vLLM declares them elsewhere.

    Args:
        folder: vLLM's folder.
    """
    path = folder / _FILE
    if not path.is_file():
        return {}
    definition = fields_of(path.read_text(encoding="utf-8"), _CLASS)
    return {} if definition is None else {name: field.annotation for name, field in annotated(definition).items()}


def why_refused(name: str, value: Any, never: Container[str]) -> str | None:
    """Returns why vLLM would refuse an argument, with the remedy; None if it would not, or is not installed here.

    Args:
        name: the argument's name.
        value: its value in a recipe; null is left to vLLM.
        never: arguments that a recipe may not set, and that no message suggests.
    """
    folder = source_folder()
    declared = {} if folder is None else declared_arguments(folder)
    if not declared:
        return None
    if name not in declared:
        close = nearest(name, (other for other in declared if other not in never), cutoff=KEYS_ALIKE)
        return f"is not an argument of the installed vLLM{f'; did you mean {close}?' if close else '; delete it'}"
    if value is None or _VLLM_ANNOTATIONS.accepts(declared[name], value):
        return None
    return f"is {show(value)}, but must be {_VLLM_ANNOTATIONS.words(declared[name])} for the installed vLLM"
