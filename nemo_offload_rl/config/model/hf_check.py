"""Checks the recipe's model before anything is built: `policy.hf_config`, its overrides, and the model's folder.

transformers silently keeps unknown fields, and uses the default of the field that the user meant. Ranges of values, and
contradictions between them, are left to transformers, Megatron-Bridge and the model check.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.installed.declared_fields import accepts, words_of
from nemo_offload_rl.config.installed.transformers_source import (
    MODEL_TYPE,
    HfFamily,
    activations,
    causal_models,
    family,
    known_family,
    model_types,
    rope_fields,
    rope_validators,
)
from nemo_offload_rl.config.model.families import model_fields
from nemo_offload_rl.config.problems import KEYS_ALIKE, did_you_mean, nearest, show, show_choices, unquoted

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
        hint = did_you_mean(model_type, causal_models()) or did_you_mean(model_type, model_types())
        return f"must be a family that the installed transformers knows; found {show(model_type)}{hint}"
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
    if annotation is not None and not accepts(annotation, value):
        return f"must be {words_of(annotation)}, as transformers says; found {show(value)}{unquoted(value)}"
    if name in _ACTIVATION_KEYS and isinstance(value, str) and value not in activations():
        return f"must be an activation of transformers; found {show(value)}{did_you_mean(value, activations())}"
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
    if any(isinstance(item, dict) for item in value.values()):
        for layer_type, of_layers in value.items():
            yield from _rope_problems(f"{path}.{layer_type}", of_layers, known)
        return
    validators = rope_validators()
    rope_type = value.get("rope_type", value.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in validators:
        hint = did_you_mean(rope_type, validators)
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
        elif annotation is not None and not accepts(annotation, item):
            yield f"{path}.{name}", f"must be {words_of(annotation)}; found {show(item)}"
    for name in sorted(
        required - {name for name in value if value[name] is not None} - {*_EVERY_ROPE, _ORIGINAL_LENGTH}
    ):
        yield f"{path}.{name}", f"missing; rope_type {rope_type} needs it"


# Megatron-Bridge reads no other files, such as pytorch_model.bin.
_WEIGHTS, _INDEX = "*.safetensors", "model.safetensors.index.json"


class ModelFolderError(ValueError):
    """Says that the model is not at the place that the recipe names, or is incomplete there."""


def check_model_folder(config: Mapping[str, Any], *, needs_weights: bool = True) -> None:
    """Refuses a model that is not where the recipe says; names on a hub are left to transformers.

    Args:
        config: a validated recipe.
        needs_weights: whether the model's weights are needed in addition to its config.

    Raises:
        ModelFolderError: the folder does not exist, or has no config.json or no weights.
    """
    policy = config["policy"]
    name = policy["model_name"]
    is_label = bool(policy["hf_config"]) or "warm_start" in config
    if is_label:
        return
    path = Path(name)
    if path.is_dir():
        _check_contents(path, needs_weights=needs_weights)
    elif path.exists():
        raise ModelFolderError(
            f"policy.model_name is {name!r}, which is a file; give the model's folder, or a hub name."
        )
    elif _looks_like_a_path(name):
        raise ModelFolderError(
            f"policy.model_name is {name!r}, but there is no such folder{_remedy(path)}; give a folder in Hugging "
            "Face format, a hub name such as org/model, or policy.hf_config for random weights."
        )


def _looks_like_a_path(name: str) -> bool:
    """Returns whether a name cannot be a hub's, which is MODEL or ORGANISATION/MODEL."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name


def _remedy(path: Path) -> str:
    if str(path).startswith("~"):
        return " (~ is not the home folder in a recipe)"
    folder = path.parent
    if not folder.is_dir():
        return f" (nor {folder})"
    close = nearest(path.name, (entry.name for entry in folder.iterdir() if entry.is_dir()))
    return f" (did you mean {folder / close}?)" if close else ""


def _check_contents(folder: Path, *, needs_weights: bool) -> None:
    where = f"policy.model_name is {str(folder)!r}, a folder"
    config = folder / "config.json"
    if not config.is_file():
        raise ModelFolderError(f"{where} without a config.json; give one in Hugging Face format.")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(
            f"{where} whose config.json is not valid JSON ({error}); give one in Hugging Face format."
        ) from error
    if not needs_weights:
        return
    missing = [name for name in _listed(folder / _INDEX) if not (folder / name).is_file()]
    if missing:
        raise ModelFolderError(f"{where} without {missing[0]}, which its index lists; copy the whole model.")
    if not any(folder.glob(_WEIGHTS)):
        raise ModelFolderError(
            f"{where} with a config.json and no weights (*.safetensors); give one with weights, or policy.hf_config "
            "for random ones."
        )


def _listed(index: Path) -> list[str]:
    """Returns the files that a weight index lists; an empty list if there is no index."""
    if not index.is_file():
        return []
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelFolderError(f"{index} is not a valid index of weights ({type(error).__name__}: {error}).") from error
