"""Checks `policy.hf_config` and `policy.hf_config_overrides` against the fields that transformers declares.

transformers silently keeps unknown fields, and uses the default of the field that the user meant.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nemo_offload_rl.config.installed.annotations import DTYPES, Annotations
from nemo_offload_rl.config.installed.transformers_source import (
    MODEL_TYPE,
    HfFamily,
    HfField,
    activations,
    causal_models,
    family,
    known_family,
    layer_types,
    model_types,
)
from nemo_offload_rl.config.model.hf_ranges import is_size, out_of_range
from nemo_offload_rl.config.model.hf_rope import ROPE_KEYS, rope_problems
from nemo_offload_rl.config.model.model_kind import model_fields
from nemo_offload_rl.config.problems import KEYS_ALIKE, is_number, nearest, show, show_choices

HF_CONFIG, OVERRIDES = "policy.hf_config", "policy.hf_config_overrides"
# Multi-token-prediction layers: transformers has none, and they are switched off here.
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_LAYER_TYPE_KEYS = ("layer_types", "mlp_layer_types")
# Families to check first if a model's family is unknown.
_WIDESPREAD = ("llama", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "deepseek_v3", "gpt_oss")

_ANNOTATIONS = Annotations(lambda name: None, accepts_unknown=True, finite=True)

Found = tuple[str, str]


def hf_config_problems(policy: Mapping[str, Any]) -> Iterator[Found]:
    """Yields what is wrong with the fields of the model's config in a recipe.

    Args:
        policy: the recipe's section `policy`, not checked yet.

    Yields:
        The full path of a key, and what is wrong with it.
    """
    given, overrides = (_mapping(policy, key.rpartition(".")[2]) for key in (HF_CONFIG, OVERRIDES))
    if given is not None:
        yield from _model_type_problems(given)
        known = known_family(given)
        if known is None or given[MODEL_TYPE] in causal_models():
            yield from _section_problems(HF_CONFIG, given, known, given)
    if overrides is not None:
        name = policy["model_name"] if isinstance(policy.get("model_name"), str) else ""
        model = given if given is not None else model_fields(name, None, None)
        if MODEL_TYPE in overrides and MODEL_TYPE in model and overrides[MODEL_TYPE] != model[MODEL_TYPE]:
            yield (
                f"{OVERRIDES}.{MODEL_TYPE}",
                f"cannot be changed: the model's is {show(model[MODEL_TYPE])}; found {show(overrides[MODEL_TYPE])}: "
                f"delete it, or give another model in {HF_CONFIG} or policy.model_name",
            )
        yield from _section_problems(OVERRIDES, overrides, known_family(model), {**model, **overrides})


def size_problems(fields: Mapping[str, Any]) -> Iterator[Found]:
    """Yields what is wrong with the sizes in a folder's config.json, which may have undeclared fields.

    Yields:
        The name of a field, and the rule that its value breaks.
    """
    known = known_family(fields)
    if known is None:
        return
    for name, value in fields.items():
        declared = known.field(name)
        if (
            is_size(name)
            and declared is not None
            and (message := _value_problem(name, value, declared, known.class_name))
        ):
            yield name, message.partition(";")[0].partition(", as transformers'")[0]


def _mapping(policy: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return policy[name] if name in policy and isinstance(policy[name], dict) else None


def _model_type_problems(given: Mapping[str, Any]) -> Iterator[Found]:
    path = f"{HF_CONFIG}.{MODEL_TYPE}"
    if MODEL_TYPE not in given or given[MODEL_TYPE] is None:
        yield path, "missing; it names the model's family for transformers, such as qwen3 or llama"
        return
    model_type = given[MODEL_TYPE]
    if not isinstance(model_type, str):
        yield path, f"must be text; found {show(model_type)}"
    elif model_type not in model_types():
        close = nearest(model_type, causal_models()) or nearest(model_type, model_types())
        hint = f"; did you mean {close}?" if close else ""
        yield path, f"must be a family that the installed transformers knows; found {show(model_type)}{hint}"
    elif model_type not in causal_models():
        yield path, f"is {show(model_type)}, for which transformers has no causal language model; give another family"


def _section_problems(
    path: str, values: Mapping[str, Any], known: HfFamily | None, model: Mapping[str, Any]
) -> Iterator[Found]:
    for name, value in values.items():
        if name == MODEL_TYPE:
            continue
        if not isinstance(name, str):
            yield f"{path}.{name}", f"a key must be text; found {show(name)}"
            continue
        message = _of_unknown_family(path, name, value) if known is None else _field_problem(path, name, value, known)
        if message is not None:
            yield f"{path}.{name}", message
    fields = model if known is None else known.canonical_values(model)
    for name in ROPE_KEYS:
        if name in values:
            yield from rope_problems(f"{path}.{name}", values[name], fields, known)
    yield from _contradictions(path, values, known)


def _field_problem(path: str, name: str, value: Any, known: HfFamily) -> str | None:
    """Returns what is wrong with a field of a family; None if it is valid."""
    declared = known.field(name)
    if declared is not None:
        return _value_problem(name, value, declared, known.class_name)
    if name in _MTP_KEYS:
        return (
            None if value in (0, None) else f"multi-token prediction is not supported here; set it to 0; found {value}"
        )
    return f"unknown key: transformers' {known.class_name} has no such field{_nearest_key(path, name, known.names())}"


def _nearest_key(path: str, name: str, names: Iterable[str]) -> str:
    close = nearest(name, names, cutoff=KEYS_ALIKE)
    return f"; nearest valid key: {path}.{close}" if close else ""


def _value_problem(name: str, value: Any, declared: HfField, class_name: str) -> str | None:
    if name in ROPE_KEYS:
        return None  # checked key by key
    if declared.annotation is not None and not _ANNOTATIONS.accepts(declared.annotation, value):
        words = list(dict.fromkeys(_ANNOTATIONS.words(declared.annotation)))
        quoted = "; write it without quotes" if isinstance(value, str) and is_number(value) else ""
        if _has_non_finite(value):
            words = [word.replace("a number", "a finite number") for word in words]
        return f"must be {' or '.join(words)}, as transformers' {class_name} says; found {show(value)}{quoted}"
    return _word_problem(name, value) or out_of_range(name, value)


def _has_non_finite(value: Any) -> bool:
    return isinstance(value, float) and out_of_range("", value) is not None


def _word_problem(name: str, value: Any) -> str | None:
    """Returns what is wrong with a text that must be one of a few words."""
    if name in _LAYER_TYPE_KEYS and isinstance(value, list):
        return next((message for item in value if (message := _not_among(item, layer_types())) is not None), None)
    if not isinstance(value, str):
        return None
    if name in _ACTIVATION_KEYS:
        return _not_among(value, activations())
    return _not_among(value, DTYPES) if name in _DTYPE_KEYS else None


def _not_among(value: Any, choices: tuple[str, ...]) -> str | None:
    if value in choices:
        return None
    close = nearest(value, choices) if isinstance(value, str) else None
    return f"must be {show_choices(choices)}; found {show(value)}" + (f"; did you mean {close}?" if close else "")


def _of_unknown_family(path: str, name: str, value: Any) -> str | None:
    """Returns the problem that every family with the field has with its value; or that no family has the field."""
    first: str | None = None
    is_known = False
    names: dict[str, None] = {}
    for model_type in dict.fromkeys((*_WIDESPREAD, *causal_models())):
        known = family(model_type) if model_type in model_types() else None
        if known is None:
            continue
        names |= dict.fromkeys(known.names())
        declared = known.field(name)
        if declared is None and name not in _MTP_KEYS:
            continue
        message = _field_problem(path, name, value, known)
        says_type = declared is None or declared.annotation is not None
        if message is None and (says_type or name in ROPE_KEYS):
            return None
        first, is_known = first or message, True
    if is_known:
        return first
    return f"unknown key: no family of transformers has such a field{_nearest_key(path, name, names)}"


def _contradictions(path: str, values: Mapping[str, Any], known: HfFamily | None) -> Iterator[Found]:
    """Yields contradictions: settings that the config gives twice."""
    given = [name for name in ROPE_KEYS if values.get(name)]
    if len(given) > 1:
        yield f"{path}.rope_scaling", "is the old name of rope_parameters, which is also set; delete one of them"
    theta = values["rope_theta"] if "rope_theta" in values else None
    for name in given:
        inner = values[name]["rope_theta"] if isinstance(values[name], dict) and "rope_theta" in values[name] else None
        if None not in (theta, inner) and theta != inner:
            yield (
                f"{path}.rope_theta",
                f"is {show(theta)}, but {path}.{name}.rope_theta is {show(inner)}; delete one of them",
            )
    for alias, name in (known.aliases if known is not None else {}).items():
        if alias in values and name in values and values[alias] != values[name]:
            yield (
                f"{path}.{alias}",
                f"is {show(values[alias])}, but {path}.{name}, another name of it, is {show(values[name])}; delete "
                "one of them",
            )
