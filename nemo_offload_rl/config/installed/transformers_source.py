"""Reads the fields and models that the installed transformers declares from its source, without importing it.

Importing transformers takes seconds; the source of one family's config parses in a few milliseconds.
"""

import ast
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.installed.declared_fields import annotated, fields_of

MODEL_TYPE = "model_type"

_BASE = "PreTrainedConfig"
_COMMON = "configuration_utils.py"
# Fields that every config accepts without declaring them: the base class reads some from keyword arguments, and the
# library reads the others from any config that has them.
_FURTHER = {
    "model_type": "str",
    "torch_dtype": "str | None",
    "num_labels": "int",
    "name_or_path": "str",
    "output_attentions": "bool",
    "attn_implementation": "str | None",
    "experts_implementation": "str | None",
    "tie_word_embeddings": "bool",
    "use_cache": "bool",
    "bos_token_id": "int | None",
    "eos_token_id": "int | list[int] | None",
    "pad_token_id": "int | None",
    "tokenizer_class": "str | None",
}
_FLOATS = ("float", "float | None", "None | float")
# Fields that a config with rotary embeddings accepts.
_ROPE_TYPES = {
    **dict.fromkeys(("rope_parameters", "rope_scaling"), "dict | None"),
    "rope_theta": "float",
    "partial_rotary_factor": "float | None",
}


@dataclass(frozen=True)
class HfFamily:
    """Describes the config class of one model type in transformers.

    Attributes:
        class_name: its name in transformers.
        folder: the folder of the family's sources.
        fields: the types of all fields that the class accepts, by name.
        aliases: other names of fields, each with the name that the class declares.
        rope_keys: keys of `rope_parameters` that only this family has.
    """

    class_name: str
    folder: Path
    fields: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope_keys: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        """Returns whether the family has a field, under this name or another one of it."""
        same = self._same(name)
        return len(same) > 1 or any(one in self.fields for one in same) or _is_read(self.folder, name)

    def annotation(self, name: str) -> str | None:
        """Returns the type of a field; None if transformers declares none."""
        return next((self.fields[one] for one in self._same(name) if one in self.fields), None)

    def _same(self, name: str) -> set[str]:
        """Returns all names of a field."""
        declared = self.aliases[name] if name in self.aliases else name
        return {name, declared, *(alias for alias, target in self.aliases.items() if target == name)}

    def names(self) -> list[str]:
        """Returns the names of all fields, including aliases."""
        return [*self.fields, *self.aliases, *self.aliases.values()]


@cache
def model_types() -> Mapping[str, str]:
    """Returns the model types that transformers knows, each with its config class."""
    names = dict(_pairs("models/auto/auto_mappings.py", "CONFIG_MAPPING_NAMES"))
    return names | _updates("CONFIG_MAPPING_NAMES") | {"gpt-sw3": "GPT2Config"}


@cache
def causal_models() -> Mapping[str, str]:
    """Returns the model types that have a causal language model in transformers, each with its class."""
    return dict(_pairs("models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"))


@cache
def family(model_type: str) -> HfFamily | None:
    """Returns the family of a model type, with the fields of its config; None if the source does not show them.

    Args:
        model_type: a key of `model_types`.
    """
    class_name = model_types()[model_type]
    module = _modules()[model_type] if model_type in _modules() else model_type.replace("-", "_")
    folder = transformers_root() / "models" / module
    for path in sorted(folder.glob("configuration_*.py")):
        classes = _classes(path)
        if class_name in classes:
            return _family(class_name, folder, _bases_first(class_name, classes))
    others = [name for name, other in model_types().items() if other == class_name and name != model_type]
    return family(others[0]) if others else None


def known_family(fields: Mapping[str, Any]) -> HfFamily | None:
    """Returns the family of a config; None if the config names none that transformers knows."""
    model_type = fields[MODEL_TYPE] if MODEL_TYPE in fields else None
    return family(model_type) if isinstance(model_type, str) and model_type in model_types() else None


def with_floats(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with 1.0 instead of 1 wherever transformers declares a float and rejects integers."""
    known = known_family(fields)
    floats = () if known is None else [name for name in fields if known.annotation(name) in _FLOATS]
    return {name: float(value) if name in floats and type(value) is int else value for name, value in fields.items()}


@cache
def rope_validators() -> Mapping[str, tuple[frozenset[str], frozenset[str]]]:
    """Returns the types of rotary embeddings, each with the required and the allowed keys of `rope_parameters`."""
    mixin = _classes(transformers_root() / "modeling_rope_utils.py")["RotaryEmbeddingConfigMixin"]
    validators = {}
    for method in mixin.body:
        if isinstance(method, ast.FunctionDef) and (
            found := re.fullmatch(r"_validate_(\w+)_rope_parameters", method.name)
        ):
            keys = {"required_keys": frozenset[str](), "optional_keys": frozenset[str]()}
            for statement in method.body:
                if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Set):
                    keys[ast.unparse(statement.targets[0])] = frozenset(ast.literal_eval(statement.value))
            validators[found[1]] = (keys["required_keys"], keys["optional_keys"])
    return validators


@cache
def rope_fields() -> Mapping[str, str]:
    """Returns the keys of `rope_parameters` for which transformers declares types, with these."""
    return annotated(_classes(transformers_root() / "modeling_rope_utils.py")["RopeParameters"])


@cache
def activations() -> tuple[str, ...]:
    """Returns the names of the activation functions that transformers knows."""
    table = _assigned("activations.py", "ACT2CLS")
    assert isinstance(table, ast.Dict)
    return tuple(ast.literal_eval(key) for key in table.keys if key is not None)


@cache
def transformers_root() -> Path:
    """Returns the folder of the installed transformers.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec("transformers")  # of a top-level package: finding it imports nothing
    if spec is None or spec.origin is None:
        raise ValueError(
            "transformers is not installed in this environment, so the model's config cannot be checked; run make setup"
        )
    return Path(spec.origin).parent


@cache
def _text(file: str) -> str:
    return (transformers_root() / file).read_text(encoding="utf-8")


def _assigned(file: str, name: str) -> ast.expr:
    """Returns the value that a module assigns to a name; parses only these lines, since some modules are long."""
    found = re.search(rf"^{name} = .*?^[)}}\]]+$", _text(file), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{file} of the installed transformers assigns no {name}"
    [statement] = ast.parse(found[0]).body
    assert isinstance(statement, ast.Assign)
    return statement.value


def _pairs(file: str, name: str) -> list[tuple[str, str]]:
    """Returns the entries of an OrderedDict that a module assigns to a name."""
    call = _assigned(file, name)
    assert isinstance(call, ast.Call)
    return [(key, value) for key, value in ast.literal_eval(call.args[0]) if isinstance(value, str)]


def _updates(name: str) -> dict[str, str]:
    """Returns the entries that transformers adds to a mapping by hand."""
    found = re.search(rf"^{name}\.update\(\n(.*?)\n\)", _text("models/auto/configuration_auto.py"), re.M | re.S)
    return {} if found is None else dict(ast.literal_eval(found[1].strip()))


@cache
def _modules() -> Mapping[str, str]:
    """Returns the model types whose module has another name."""
    name = "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"
    return dict(_pairs("models/auto/auto_mappings.py", name)) | _updates(name)


@cache
def _classes(path: Path) -> Mapping[str, ast.ClassDef]:
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    return {statement.name: statement for statement in statements if isinstance(statement, ast.ClassDef)}


def _bases_first(class_name: str, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Returns the classes of the same module that a class inherits from, followed by the class."""
    definition = classes[class_name]
    bases = [ast.unparse(base) for base in definition.bases]
    return [*(one for base in bases if base in classes for one in _bases_first(base, classes)), definition]


@cache
def _is_read(folder: Path, name: str) -> bool:
    """Returns whether a family reads a field that its config does not declare, such as qwen3_moe's head_dim."""
    pattern = re.compile(rf"(?:config|self)\.{re.escape(name)}\b|[\"']{re.escape(name)}[\"']|def {re.escape(name)}\(")
    sources = [*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")]
    return any(pattern.search(path.read_text(encoding="utf-8")) for path in sources)


def _family(class_name: str, folder: Path, definitions: list[ast.ClassDef]) -> HfFamily:
    fields = dict(_common_fields())
    aliases: dict[str, str] = {}
    rope_keys: set[str] = set()
    for definition in definitions:
        fields |= annotated(definition)
        for statement in definition.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id
                if name == "attribute_map":
                    aliases |= ast.literal_eval(statement.value)
                elif name == "ignore_keys_at_rope_validation":
                    rope_keys |= set(ast.literal_eval(statement.value))
    if "rope_parameters" in fields or "rope_theta" in fields:
        fields = _ROPE_TYPES | fields
    return HfFamily(class_name, folder, fields, aliases, frozenset(rope_keys))


@cache
def _common_fields() -> Mapping[str, str]:
    """Returns the fields that every config accepts."""
    definition = fields_of(_text(_COMMON), _BASE)
    assert definition is not None, f"{_COMMON} of the installed transformers has no class {_BASE}"
    return annotated(definition) | _FURTHER
