"""The Hugging Face config of a recipe's model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def _told(where: str) -> Iterator[None]:
    """What transformers does with values that a model cannot have: it checks some of them, and fails in others.

    Args:
        where: the values are from.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{where} has a value that cannot be: {type(error).__name__}: {error}") from error


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
        with _told("policy.hf_config"):
            config = AutoConfig.for_model(model_type, **fields)
    else:
        try:
            with _told(f"The config of policy.model_name {policy['model_name']!r}"):
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
        with _told(f"policy.hf_config_overrides.{key}"):
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
