"""Checks `policy.hf_config` and `policy.hf_config_overrides` against the fields that transformers declares.

transformers silently keeps unknown fields, and uses the default of the field that the user meant. Ranges of values, and
contradictions between them, are left to transformers, Megatron-Bridge and the model check.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nemo_offload_rl.config.installed.declared_fields import Annotations
from nemo_offload_rl.config.installed.transformers_source import (
    MODEL_TYPE,
    HfFamily,
    activations,
    causal_models,
    family,
    known_family,
    layer_types,
    model_types,
    rope_fields,
    rope_validators,
)
from nemo_offload_rl.config.model.model_kind import model_fields
from nemo_offload_rl.config.problems import KEYS_ALIKE, is_number, nearest, show, show_choices

HF_CONFIG, OVERRIDES = "policy.hf_config", "policy.hf_config_overrides"
# Rotary embeddings: the present name of the mapping, and the former one.
ROPE_KEYS = ("rope_parameters", "rope_scaling")
# Their keys with every rope_type, including `type`, its former name.
_EVERY_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# If absent, transformers takes it from max_position_embeddings.
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Multi-token-prediction layers: transformers has none, and they are switched off here.
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")

_ANNOTATIONS = Annotations(lambda name: None, accepts_unknown=True, finite=True)

Found = tuple[str, str]


def hf_config_problems(policy: Mapping[str, Any]) -> Iterator[Found]:
    """Yields what is wrong with the fields of the model's config in a recipe.

    Args:
        policy: the recipe's section `policy`, not checked yet.

    Yields:
        The full path of a key, and what is wrong with it.
    """
    given, overrides = (policy.get(key.rpartition(".")[2]) for key in (HF_CONFIG, OVERRIDES))
    if isinstance(given, dict):
        message = _model_type_problem(given.get(MODEL_TYPE))
        if message is not None:
            yield f"{HF_CONFIG}.{MODEL_TYPE}", message
        if message is None or known_family(given) is None:
            yield from _section_problems(HF_CONFIG, given, known_family(given))
    if isinstance(overrides, dict):
        name = policy["model_name"] if isinstance(policy.get("model_name"), str) else ""
        model = given if isinstance(given, dict) else model_fields(name, None, None)
        if MODEL_TYPE in overrides and overrides[MODEL_TYPE] != model.get(MODEL_TYPE, overrides[MODEL_TYPE]):
            yield f"{OVERRIDES}.{MODEL_TYPE}", f"cannot be changed: the model's is {show(model[MODEL_TYPE])}; delete it"
        yield from _section_problems(OVERRIDES, overrides, known_family(model))


def _model_type_problem(model_type: Any) -> str | None:
    if model_type is None:
        return "missing; it names the model's family for transformers, such as qwen3 or llama"
    if not isinstance(model_type, str) or model_type not in model_types():
        close = nearest(str(model_type), causal_models()) or nearest(str(model_type), model_types())
        return f"must be a family that the installed transformers knows; found {show(model_type)}{_meant(close)}"
    if model_type not in causal_models():
        return f"is {show(model_type)}, for which transformers has no causal language model; give another family"
    return None


def _section_problems(path: str, values: Mapping[str, Any], known: HfFamily | None) -> Iterator[Found]:
    for name, value in values.items():
        message = None if name == MODEL_TYPE else _field_problem(path, str(name), value, known)
        if message is not None:
            yield f"{path}.{name}", message
        elif name in ROPE_KEYS:
            yield from _rope_problems(f"{path}.{name}", value, known)
    if all(values.get(name) for name in ROPE_KEYS):
        yield f"{path}.rope_scaling", "is the old name of rope_parameters, which is also set; delete one of them"


def _field_problem(path: str, name: str, value: Any, known: HfFamily | None) -> str | None:
    """Returns what is wrong with a field, of any family if that is unknown; None if it is valid."""
    if not any(one.has(name) for one in _families(known)):
        if name in _MTP_KEYS:
            return None if value in (0, None) else "multi-token prediction is not supported here; set it to 0"
        which = "no family of transformers has" if known is None else f"transformers' {known.class_name} has no"
        close = nearest(name, {name for one in _families(known) for name in one.names()}, cutoff=KEYS_ALIKE)
        hint = f"; nearest valid key: {path}.{close}" if close else ""
        return f"unknown key: {which} such field{hint}"
    annotation = None if known is None or name in ROPE_KEYS else known.annotation(name)
    if annotation is not None and not _ANNOTATIONS.accepts(annotation, value):
        words = _ANNOTATIONS.words(annotation)
        quoted = "; write it without quotes" if isinstance(value, str) and is_number(value) else ""
        return f"must be {words}, as transformers says; found {show(value)}{quoted}"
    if name in _ACTIVATION_KEYS and isinstance(value, str) and value not in activations():
        return f"must be an activation of transformers; found {show(value)}{_meant(nearest(value, activations()))}"
    return None


def _families(known: HfFamily | None) -> Iterable[HfFamily]:
    if known is not None:
        return [known]
    return (one for name in causal_models() if name in model_types() and (one := family(name)) is not None)


def _rope_problems(path: str, value: Any, known: HfFamily | None) -> Iterator[Found]:
    """Yields unknown, missing and badly typed keys of rotary embeddings, which transformers only warns of."""
    if not value:
        return
    if not isinstance(value, dict):
        yield path, f"must be a mapping such as {{rope_type: yarn, factor: 4.0}}, or null; found {show(value)}"
        return
    if set(value) <= set(layer_types()):
        for layer_type, of_layers in value.items():
            yield from _rope_problems(f"{path}.{layer_type}", of_layers, known)
        return
    validators = rope_validators()
    rope_type = value.get("rope_type", value.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in validators:
        hint = _meant(nearest(str(rope_type), validators))
        yield f"{path}.rope_type", f"must be {show_choices(validators)}; found {show(rope_type)}{hint}"
        return
    required, optional = validators[rope_type]
    names = {*_EVERY_ROPE, *required, *optional, *(known.rope_keys if known is not None else ())}
    for name, item in value.items():
        annotation = rope_fields().get(name)
        if name not in names:
            close = nearest(str(name), names)
            hint = f"; nearest valid key: {close}" if close else ""
            yield f"{path}.{name}", f"unknown key{hint}; rope_type {rope_type} has {', '.join(sorted(names))}"
        elif annotation is not None and not _ANNOTATIONS.accepts(annotation, item):
            yield f"{path}.{name}", f"must be {_ANNOTATIONS.words(annotation)}; found {show(item)}"
    for name in sorted(
        required - {name for name in value if value[name] is not None} - {*_EVERY_ROPE, _ORIGINAL_LENGTH}
    ):
        yield f"{path}.{name}", f"missing; rope_type {rope_type} needs it"


def _meant(close: str | None) -> str:
    return f"; did you mean {close}?" if close else ""
