"""Loads the Hugging Face config of a recipe's model."""

import copy
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from nemo_offload_rl.config.installed.transformers_source import causal_models, with_floats
from nemo_offload_rl.config.schema.policy import HfConfigFields
from nemo_offload_rl.hub import cache_only, folder_hint, needs_code, why_missing

_read_from_hub: set[str] = set()
"""Names of models whose configs this process has read from the hub, and which are now in the hub's cache."""

GENERATION_CONFIG_FILE = "generation_config.json"

_WRITER = "auto_class_docstring"
_IN_ROPE = ("rope_theta", "partial_rotary_factor")  # transformers keeps these in rope_parameters
_ROPE_KEYS = ("rope_parameters", "rope_scaling")  # transformers' present name, and the former one


class UnreachableModelError(ValueError):
    """Says that a model is neither in a folder nor on a hub that can be reached."""


@contextmanager
def _readable_errors(where: str) -> Iterator[None]:
    """Turns transformers' errors about invalid values, of which it checks only some, into a ValueError for the user.

    Args:
        where: the source of the values, in words.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        message = " ".join(str(error).split())  # some have several lines
        raise ValueError(f"{where} has an invalid value: {type(error).__name__}: {message}") from error


@contextmanager
def _without_docstrings() -> Iterator[None]:
    """Keeps transformers from writing docstrings of the classes that it imports inside this context.

    For the docstring of any config it imports the code of models, and with it torch's compiler, which takes seconds.
    """
    module: Any = importlib.import_module("transformers.utils.auto_docstring")
    if (write := getattr(module, _WRITER, None)) is None:  # another version of transformers, which may be slow
        yield
        return
    setattr(module, _WRITER, lambda config_class, **_: config_class)
    try:
        yield
    finally:
        setattr(module, _WRITER, write)


class ModelSource(TypedDict):
    """The keys of the section `policy` that say which model to build, with or without its others."""

    model_name: str
    hf_config: NotRequired[HfConfigFields | None]
    hf_config_overrides: NotRequired[HfConfigFields]
    trust_remote_code: NotRequired[bool]


def trusts_remote_code(policy: ModelSource) -> bool:
    """Returns whether code in the model's files may run; without the answer transformers asks on standard input."""
    return policy.get("trust_remote_code") is True


def hf_config(policy: ModelSource) -> Any:
    """Returns the Hugging Face config of the policy's model.

    Returns:
        A `transformers.PretrainedConfig` from the recipe's `hf_config` mapping or from `model_name`, with
        `hf_config_overrides` applied.

    Raises:
        UnreachableModelError: `model_name` is neither a folder nor a name that can be resolved.
        ValueError: transformers does not know the mapping's `model_type` or has no causal language model for it, a
            field has an invalid value, or an override names a field that does not exist.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    mapping = policy.get("hf_config")
    if mapping is not None:
        fields = copy.deepcopy(with_floats(mapping))  # transformers modifies its arguments
        model_type = fields.pop("model_type", None)
        if model_type not in CONFIG_MAPPING:
            raise ValueError(
                f"policy.hf_config.model_type is {model_type!r}, which the installed transformers does not know; give "
                "one that it does, such as 'qwen2'."
            )
        # Without the key, some families have a default, which is a token of their own first models' vocabulary.
        fields.setdefault("eos_token_id", None)
        with _readable_errors("policy.hf_config"), _without_docstrings():
            config = AutoConfig.for_model(model_type, **fields)
    else:
        name = policy["model_name"]
        try:
            with _readable_errors(f"The config of policy.model_name {name!r}"), _without_docstrings():
                config = AutoConfig.from_pretrained(
                    name,
                    local_files_only=name in _read_from_hub or cache_only(name),
                    trust_remote_code=trusts_remote_code(policy),
                )
        except ValueError as error:
            if not needs_code(error):
                raise
            raise ValueError(
                f"policy.model_name is {name!r}, whose config needs code of its own, which only runs with "
                "policy.trust_remote_code: true; set it if you trust that code, or take another model."
            ) from error
        except OSError as error:
            missing, detail = why_missing(name), ""
            if missing is None:  # the hub is reachable
                missing = (
                    f"which is neither a folder with a config.json{folder_hint(name)} nor a model of a hub that can be "
                    "reached"
                )
                detail = f" ({error})"
            raise UnreachableModelError(
                f"policy.model_name is {name!r}, {missing}; give a folder, or policy.hf_config for random weights."
                f"{detail}"
            ) from error
        if not Path(name).is_dir():
            _read_from_hub.add(name)
    overrides = policy["hf_config_overrides"] if "hf_config_overrides" in policy else {}
    _override(config, overrides)
    _check_windows(config, overrides)
    if not config.architectures:
        if config.model_type not in causal_models():
            raise ValueError(
                f"The model's model_type is {config.model_type!r}, of which transformers has no causal language model; "
                "give another model in policy.model_name or policy.hf_config."
            )
        config.architectures = [causal_models()[config.model_type]]
    return config


def generation_config(policy: ModelSource) -> dict[str, Any] | None:
    """Returns the contents of the model's generation_config.json, from its folder or the hub.

    Returns:
        None if the model has no such file, or random weights.

    Raises:
        ValueError: the file is not a JSON object, or its `eos_token_id` is not a token id, a list of them or null.
    """
    if policy.get("hf_config") is not None:
        return None
    from transformers.utils import cached_file

    name = policy["model_name"]
    try:
        path = cached_file(name, GENERATION_CONFIG_FILE, local_files_only=cache_only(name))
    except OSError:  # there is no such file, as transformers and vLLM also conclude
        return None
    where = f"The {GENERATION_CONFIG_FILE} of policy.model_name {name!r}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON ({error}); copy the model again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds no JSON object; copy the model again.")
    ends = content.get("eos_token_id")
    if not all(type(token) is int for token in _as_list(ends)):
        raise ValueError(f"{where} has eos_token_id {ends!r}, which must be a token id, a list of them, or null.")
    return content


def model_end_token_ids(policy: ModelSource) -> list[int]:
    """Returns the tokens that end the model's answers, sorted; those outside its vocabulary are left out.

    As in transformers and vLLM, they are the `eos_token_id` of generation_config.json, or of config.json if there is
    no such file. A model with random weights has those of `hf_config`.

    Raises:
        UnreachableModelError, ValueError: see `hf_config` and `generation_config`.
    """
    from transformers import GenerationConfig

    config, content = hf_config(policy), generation_config(policy)
    own = GenerationConfig.from_model_config(config).to_dict() if content is None else content
    vocab_size = config.get_text_config().vocab_size
    return sorted({token for token in _as_list(own.get("eos_token_id")) if 0 <= token < vocab_size})


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _override(config: Any, overrides: Mapping[str, Any]) -> None:
    """Overrides fields of a config, and updates the values that the config derived from them.

    Raises:
        ValueError: the config has no such field, or the field cannot have the value.
    """
    typed = with_floats({"model_type": config.model_type} | copy.deepcopy(dict(overrides)))
    for key in overrides:
        value, rope = typed[key], getattr(config, "rope_parameters", None)
        with _readable_errors(f"policy.hf_config_overrides.{key}"):
            if key in _IN_ROPE and isinstance(rope, Mapping) and "rope_theta" in rope:
                config.rope_parameters = {**rope, key: value}
            elif hasattr(config, key):
                setattr(config, key, _rope_with_its_base(config, value) if key in _ROPE_KEYS else value)
            else:
                raise ValueError(f"policy.hf_config_overrides.{key}: {type(config).__name__} has no such field.")
    kinds = getattr(config, "layer_types", None)
    if "num_hidden_layers" in overrides and "layer_types" not in overrides and isinstance(kinds, list):
        if config.num_hidden_layers > len(kinds):
            raise ValueError(
                f"policy.hf_config_overrides.num_hidden_layers is {config.num_hidden_layers}, but the config says of "
                f"{len(kinds)} layers what they are; give policy.hf_config_overrides.layer_types, too."
            )
        config.layer_types = kinds[: config.num_hidden_layers]


def _rope_with_its_base(config: Any, value: Mapping[str, Any] | None) -> Any:
    """Returns rope settings for a config, with the config's own `rope_theta` added if they have none.

    transformers 5 keeps the base among these settings, and would use the family's default instead. Null is no scaling.
    """
    before = config.rope_parameters
    if not isinstance(before, Mapping) or "rope_theta" not in before:
        return value
    if value is not None and not isinstance(value, Mapping):
        return value
    settings = {"rope_theta": before["rope_theta"], **(value or {"rope_type": "default"})}
    if "rope_type" not in settings:
        settings["rope_type"] = settings["type"] if "type" in settings else "default"
    return settings


def _check_windows(config: Any, overrides: Mapping[str, Any]) -> None:
    """Refuses to enable sliding windows that the model does not have.

    transformers reads `use_sliding_window` only while it constructs a config.

    Raises:
        ValueError: windows are switched on, and no layer has one.
    """
    if "use_sliding_window" not in overrides or not overrides["use_sliding_window"]:
        return
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if config.sliding_window is None or "sliding_attention" not in layers:
        raise ValueError(
            "policy.hf_config_overrides.use_sliding_window is true, but the model was read without windows, and no "
            "layer has one; give sliding_window there, too, and layer_types with sliding_attention where the family "
            "has them."
        )
