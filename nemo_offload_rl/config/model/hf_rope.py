"""Checks rotary embeddings in a Hugging Face config: `rope_parameters`, formerly `rope_scaling`."""

import ast
import math
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_offload_rl.config.installed.annotations import Annotations
from nemo_offload_rl.config.installed.transformers_source import HfFamily, layer_types, rope_fields, rope_validators
from nemo_offload_rl.config.model.hf_ranges import out_of_range
from nemo_offload_rl.config.problems import KEYS_ALIKE, nearest, show, show_choices

# The present name of the mapping, and the former one.
ROPE_KEYS = ("rope_parameters", "rope_scaling")
# Keys that every type may have, including `type`, the former name of rope_type.
_EVERY_TYPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# If these keys are absent, transformers takes them from elsewhere: theta from the config or the family, the original
# length from max_position_embeddings.
_TAKEN_FROM_ELSEWHERE = ("rope_type", "rope_theta", "original_max_position_embeddings")
_TYPES = {"mscale": "float | None", "mscale_all_dim": "float | None", "truncate": "bool | None", "type": "str"}
_ANNOTATIONS = Annotations(lambda name: None, accepts_unknown=True, finite=True)
_AT_LEAST_1, _ABOVE_0 = (
    ("factor",),
    ("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
)

Found = tuple[str, str]


def rope_problems(path: str, value: Any, fields: Mapping[str, Any], family: HfFamily | None) -> Iterator[Found]:
    """Yields what is wrong with `rope_parameters` or `rope_scaling`.

    Args:
        path: the key's path.
        value: the key's value.
        fields: the whole config, with its family's names and defaults.
        family: the config's family; None if it is unknown.
    """
    if value is None or value == {}:
        return
    if not isinstance(value, dict):
        yield path, f"must be a mapping such as {{rope_type: yarn, factor: 4.0}}, or null; found {show(value)}"
        return
    if set(value) <= set(layer_types()):
        for layer_type, of_layers in value.items():
            if isinstance(of_layers, dict):
                yield from _of_one_kind(f"{path}.{layer_type}", of_layers, fields, family)
            else:
                yield f"{path}.{layer_type}", f"must be a mapping with rope_type; found {show(of_layers)}"
        return
    yield from _of_one_kind(path, value, fields, family)


def _of_one_kind(
    path: str, value: Mapping[str, Any], fields: Mapping[str, Any], family: HfFamily | None
) -> Iterator[Found]:
    validators = rope_validators()
    if "rope_type" in value and "type" in value and value["rope_type"] != value["type"]:
        yield f"{path}.type", f"is the old name of rope_type, which is {show(value['rope_type'])}; delete one"
    named = next((name for name in ("rope_type", "type") if name in value), None)
    rope_type = "default" if named is None else value[named]
    if not isinstance(rope_type, str) or rope_type not in validators:
        close = nearest(rope_type, validators) if isinstance(rope_type, str) else None
        hint = f"; did you mean {close}?" if close else ""
        yield f"{path}.{named}", f"must be {show_choices(validators)}; found {show(rope_type)}{hint}"
        return
    required, optional = validators[rope_type]
    own = family.rope_keys if family is not None else frozenset()
    for name, item in value.items():
        if name not in {*_EVERY_TYPE, *required, *optional, *own}:
            yield f"{path}.{name}", _unknown(name, rope_type, named is None, {*_EVERY_TYPE, *required, *optional, *own})
        elif (message := _wrong(name, item, is_required=name in required)) is not None:
            yield f"{path}.{name}", message
    for name in sorted(required - set(value) - set(_TAKEN_FROM_ELSEWHERE)):
        yield f"{path}.{name}", f"missing; rope_type {rope_type} needs it"
    yield from _contradictions(path, rope_type, value, fields)


def _unknown(name: str, rope_type: str, is_default: bool, known: set[str]) -> str:
    close = nearest(str(name), known, cutoff=KEYS_ALIKE)
    message = "unknown key" + (f"; nearest valid key: {close}" if close else "")
    others = [other for other, keys in rope_validators().items() if name in keys[0] | keys[1]]
    if is_default and others:
        return f"{message}; it is read only with rope_type {show_choices(others)}, but rope_type is not set"
    return f"{message}; rope_type {rope_type} has {', '.join(sorted(known - {'type'}))}"


def _wrong(name: str, value: Any, *, is_required: bool) -> str | None:
    """Returns what is wrong with the type or the range of one value."""
    annotation = ast.parse(_TYPES[name], mode="eval").body if name in _TYPES else rope_fields().get(name)
    if annotation is not None and ((value is None and is_required) or not _ANNOTATIONS.accepts(annotation, value)):
        words = [word for word in _ANNOTATIONS.words(annotation) if not (is_required and word == "null")]
        return f"must be {' or '.join(words)}; found {show(value)}"
    if value is None:
        return None
    if name in _AT_LEAST_1 and value < 1:
        return f"must be at least 1; found {show(value)}"
    if name in _ABOVE_0 and value <= 0:
        return f"must be above 0; found {show(value)}"
    if isinstance(value, list) and not all(item > 0 for item in value if isinstance(item, int | float)):
        return f"must be numbers above 0; found {show(value)}"
    return out_of_range(name, value)


def _contradictions(path: str, rope_type: str, value: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[Found]:
    """Yields values that are well-typed but contradict each other."""
    pairs = {"yarn": ("beta_slow", 1, "beta_fast", 32), "llama3": ("low_freq_factor", None, "high_freq_factor", None)}
    if rope_type in pairs:
        low, low_default, high, high_default = pairs[rope_type]
        least, most = (_number(value, name, default) for name, default in ((low, low_default), (high, high_default)))
        if least is not None and most is not None and (most < least or (most == least and rope_type == "llama3")):
            yield f"{path}.{high}", f"must be above {low} ({least:g}); found {most:g}"
    if rope_type == "longrope":
        pairs_of_dims = _pairs_of_dims(value, fields)
        for name in ("short_factor", "long_factor"):
            factors = value[name] if name in value else None
            if isinstance(factors, list) and pairs_of_dims is not None and len(factors) != pairs_of_dims:
                yield (
                    f"{path}.{name}",
                    f"must have {pairs_of_dims} numbers, one per pair of head dimensions; found {len(factors)}",
                )


def _number(value: Mapping[str, Any], name: str, default: float | None) -> float | None:
    found = value[name] if name in value and value[name] is not None else default
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    return found if is_number else None


def _pairs_of_dims(value: Mapping[str, Any], fields: Mapping[str, Any]) -> int | None:
    """Returns half of the number of dimensions of a head that are rotated; None if it is unknown."""
    head_dim = fields["head_dim"] if "head_dim" in fields else None
    if head_dim is None and all(isinstance(fields.get(name), int) for name in ("hidden_size", "num_attention_heads")):
        head_dim = fields["hidden_size"] // max(1, fields["num_attention_heads"])
    share = _number({**fields, **value}, "partial_rotary_factor", 1.0)
    return int(head_dim * share) // 2 if isinstance(head_dim, int) and share is not None else None
