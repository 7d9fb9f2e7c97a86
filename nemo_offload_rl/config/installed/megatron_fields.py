"""Names and types of Megatron's own config fields, read from the installed source without importing it.

Importing megatron.core takes seconds and needs torch; its dataclasses parse in 0.05 s.
"""

import ast
import importlib.util
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.installed.annotations import Annotations, annotated, fields_of
from nemo_offload_rl.config.problems import is_number, nearest, show, show_choices


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
