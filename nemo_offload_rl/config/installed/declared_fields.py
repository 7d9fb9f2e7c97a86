"""Reads versions, fields and arguments of megatron-core, Megatron-Bridge and vLLM without importing any of them.

Names and types of Megatron's own config fields, read from the installed source without importing it. Importing
megatron.core takes seconds and needs torch; its dataclasses parse in 0.05 s.

Names and types of vLLM's engine arguments, read from the installed source without importing it. Importing vLLM takes
many seconds and needs a GPU's libraries; its arguments are one dataclass.
"""

import ast
import importlib.util
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import EllipsisType, SimpleNamespace
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import (
    AllowInfNan,
    ConfigDict,
    PydanticUserError,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from nemo_offload_rl.config.problems import KEYS_ALIKE, did_you_mean, show, show_choices, unquoted

# A class up to its first method: its fields come first, and parsing all methods takes several times as long.
_FIELDS = r"^class {}\b.*?(?=^    (?:async |def |@)|^(?:async |def |class |@)|\Z)"

DTYPES = ("float32", "bfloat16", "float16")

# Names in annotations; integers also count as numbers, and lists as tuples.
_TYPES: dict[str, Any] = {
    **{"Any": Any, "Literal": Literal, "Optional": Optional, "Union": Union},
    **{"dict": dict, "list": list, "List": list, "Sequence": list, "tuple": tuple, "Tuple": tuple},
    **{"bool": StrictBool, "int": StrictInt, "str": StrictStr},
    "float": StrictInt | Annotated[StrictFloat, AllowInfNan(False)],
    "torch": SimpleNamespace(dtype=Literal[DTYPES]),
}


class _Types(dict[str, Any]):
    """Maps names in annotations to types; the members of an enumeration of Megatron's are words."""

    def __init__(self, other: Any) -> None:
        """Starts with plain types.

        Args:
            other: the type for names that are not known here.
        """
        super().__init__(_TYPES)
        self._other = other

    def __missing__(self, name: str) -> Any:
        members = _enum_members(name)
        return self._other if members is None else self["Literal"][members]


@cache
def _adapter(annotation: str, other: Any) -> TypeAdapter[Any]:
    kind = eval(annotation, {"__builtins__": {}}, _Types(other))
    return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))


def accepts(annotation: str, value: Any, other: Any = Any) -> bool:
    """Returns whether a YAML value is of a type.

    Args:
        annotation: the type, as its library writes it.
        value: the value.
        other: what stands for types that are neither plain nor an enumeration.
    """
    try:
        _adapter(annotation, other).validate_python(value)
    except ValidationError:
        return False
    except (AttributeError, TypeError, PydanticUserError):  # arguments and attributes of such a type
        return other is Any
    return True


def words_of(annotation: str) -> str:
    """Returns a type as its library writes it, with the members of enumerations."""
    text = annotation.strip("'").replace("torch.dtype", show_choices(DTYPES))
    enums = {name: found for name in re.findall(r"\w+", text) if (found := _enum_members(name)) is not None}
    return text + "".join(f" ({name}: {show_choices(found)})" for name, found in enums.items())


def fields_of(source: str, class_name: str) -> ast.ClassDef | None:
    """Returns a class without its methods from a module's source; None if the module does not define it."""
    found = re.search(_FIELDS.format(class_name), source, re.MULTILINE | re.DOTALL)
    definition = None if found is None else ast.parse(found[0]).body[0]
    assert definition is None or isinstance(definition, ast.ClassDef)
    return definition


def annotated(definition: ast.ClassDef) -> dict[str, str]:
    """Returns the types of the fields that a class declares, by name, without private ones and class variables."""
    return {name: ast.unparse(declared.annotation) for name, declared in _declared(definition).items()}


def _declared(definition: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    return {
        statement.target.id: statement
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not statement.target.id.startswith("_")
        and not ast.unparse(statement.annotation).startswith("ClassVar")
    }


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

# Fields that megatron-core annotates as text, or a list of texts, but reads as some of a few words; it silently treats
# other words as none.
CHOICES: dict[str, tuple[str, ...]] = {
    "moe_router_load_balancing_type": (
        *("aux_loss", "seq_aux_loss", "global_aux_loss"),
        *("sinkhorn", "quantile_balancing", "none"),
    ),
    "rope_type": ("rope", "yarn"),
}


@cache
def megatron_fields(section: str) -> Mapping[str, str]:
    """Returns the fields of the Megatron config behind a section of `policy`, a key of `SECTIONS`, with their types."""
    fields: dict[str, str] = {}
    for file, class_name in SECTIONS[section].classes:
        definition = fields_of(_source(file), class_name)
        assert definition is not None, f"{file} of the installed Megatron has no class {class_name}"
        for name, declared in _declared(definition).items():
            # A subclass that changes the default may annotate text where its base lists the words.
            annotation = fields[name] if name in fields else ast.unparse(declared.annotation)
            is_null = isinstance(declared.value, ast.Constant) and declared.value.value is None
            admits_null = "Optional" in annotation or "None" in annotation
            fields[name] = f"Optional[{annotation}]" if is_null and not admits_null else annotation
    return fields


def check_field(section: str, name: str, value: Any) -> str | None:
    """Returns what is wrong with the value of a known field; None if it is valid."""
    annotation, choices = megatron_fields(section)[name], CHOICES.get(name)
    words = value if isinstance(value, list) and value else [value]
    if accepts(annotation, value, other=EllipsisType) and all(choices is None or word in choices for word in words):
        return None
    expected = words_of(annotation) if choices is None else show_choices(choices)
    if "Callable" in expected:
        return f"cannot be set in a recipe: it is a function in {SECTIONS[section].title}"
    hint = did_you_mean(value, choices) if choices is not None else unquoted(value)
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


def source_folder() -> Path | None:
    """Returns the folder of the installed vLLM; None if there is none."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


@cache
def declared_arguments(folder: Path) -> Mapping[str, str]:
    """Returns the type of each argument by name; empty if this vLLM declares them elsewhere.

    Args:
        folder: vLLM's folder.
    """
    path = folder / _FILE
    if not path.is_file():
        return {}
    definition = fields_of(path.read_text(encoding="utf-8"), _CLASS)
    return {} if definition is None else annotated(definition)


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
        hint = did_you_mean(name, (other for other in declared if other not in never), cutoff=KEYS_ALIKE)
        return f"is not an argument of the installed vLLM{hint or '; delete it'}"
    if value is None or accepts(declared[name], value):
        return None
    return f"is {show(value)}, but must be {words_of(declared[name])} for the installed vLLM"
