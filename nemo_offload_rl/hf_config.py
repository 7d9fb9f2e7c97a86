"""The Hugging Face config of a recipe's model."""

from collections.abc import Mapping
from typing import Any


def hf_config(policy: Mapping[str, Any]) -> Any:
    """The Hugging Face config of the policy's model.

    Returns:
        A `transformers.PretrainedConfig`: from the recipe's `hf_config` mapping, or that of `model_name`, with
        `hf_config_overrides` applied.

    Raises:
        ValueError: if `model_name` is neither a folder nor a name that can be resolved, if transformers does not know
            the mapping's `model_type` or has no causal language model of it, if a field has a value that it cannot
            have, or an override names no field.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        return _hf_config(policy)
    except StrictDataclassError as error:
        raise ValueError(f"policy.hf_config or hf_config_overrides has a value that cannot be: {error}") from error


def _hf_config(policy: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    mapping = policy.get("hf_config")
    if mapping is not None:
        fields = dict(mapping)
        model_type = fields.pop("model_type", None)
        if model_type not in CONFIG_MAPPING:
            raise ValueError(
                f"policy.hf_config.model_type is {model_type!r}, which the installed transformers does not know; give "
                "one that it does, such as 'qwen2'."
            )
        config = AutoConfig.for_model(model_type, **fields)
    else:
        try:
            config = AutoConfig.from_pretrained(policy["model_name"])
        except OSError as error:
            raise ValueError(
                f"policy.model_name is {policy['model_name']!r}, which is neither a folder with a config.json nor a "
                f"model of a hub that can be reached; give a folder, or policy.hf_config for random weights. ({error})"
            ) from error
    overrides = policy["hf_config_overrides"] if "hf_config_overrides" in policy else {}
    for key, value in overrides.items():
        if not hasattr(config, key):
            raise ValueError(f"policy.hf_config_overrides.{key}: {type(config).__name__} has no such field.")
        setattr(config, key, value)
    if not config.architectures:
        from transformers import AutoModelForCausalLM

        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise ValueError(
                f"The model's model_type is {config.model_type!r}, of which transformers has no causal language model; "
                "give another model in policy.model_name or policy.hf_config."
            )
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config
