"""Rules for the model: Megatron-Bridge can build it, and Megatron computes it as transformers does."""

from typing import Any

from nemo_offload_rl.config.installed.declared_fields import bridged_architectures
from nemo_offload_rl.config.installed.transformers_source import causal_models
from nemo_offload_rl.config.model.families import (
    NUM_EXPERTS_KEYS,
    NUM_HEADS_KEYS,
    count_of,
    model_fields,
    why_not_frozen,
    why_unsupported,
)
from nemo_offload_rl.config.problems import did_you_mean, show_choices
from nemo_offload_rl.config.rules.base import MEGATRON, MODEL_FIELDS, RuleResult, note, rule

_FREEZE_CONFIG = f"{MEGATRON}.freeze_config?"


@rule(*MODEL_FIELDS)
def model_bridge(*model: Any) -> RuleResult:
    """Refuses architectures that Megatron-Bridge does not translate."""
    fields = model_fields(*model)
    named, model_type = fields.get("architectures"), fields.get("model_type")
    if isinstance(named, list) and named:
        architectures = [str(name) for name in named]
    elif isinstance(model_type, str) and model_type in causal_models():
        architectures = [causal_models()[model_type]]
    else:
        return None
    bridged = bridged_architectures()
    if any(name in bridged for name in architectures):
        return None
    families = sorted(name for name, architecture in causal_models().items() if architecture in bridged)
    hint = did_you_mean(architectures[0], bridged) if named else ""
    return _path("architectures" if named else "model_type", model), (
        f"the model is {show_choices(architectures)}, which the installed Megatron-Bridge cannot build{hint}; "
        f"families that it can: {', '.join(families)}"
    )


def _path(key: str, model: Any) -> str:
    """Returns where a field of the model's config is written."""
    written = zip(("policy.hf_config_overrides", "policy.hf_config"), model[:0:-1], strict=True)
    return next((f"{section}.{key}" for section, given in written if key in (given or {})), "policy.model_name")


@rule(*MODEL_FIELDS)
def model_sizes(*model: Any) -> RuleResult:
    """Refuses sizes with which a model is built, but fails in its first step."""
    fields = model_fields(*model)
    heads, groups = count_of(fields, NUM_HEADS_KEYS), count_of(fields, ("num_key_value_heads",))
    chosen, experts = count_of(fields, ("num_experts_per_tok",)), count_of(fields, NUM_EXPERTS_KEYS)
    if heads and groups and heads % groups:
        key = "num_key_value_heads"
        return _path(key, model), f"{key} ({groups}) must divide num_attention_heads ({heads}); change either"
    if chosen and experts and chosen > experts:
        key = "num_experts_per_tok"
        return _path(key, model), f"{key} ({chosen}) must be at most the number of experts ({experts}); lower it"
    return None


@rule(*MODEL_FIELDS)
def model_computed_as_transformers(*model: Any) -> RuleResult:
    """Refuses a model that would train as a different model than the exported one."""
    found = why_unsupported(model_fields(*model))
    return None if found is None else ("policy.hf_config" if model[1] else "policy.model_name", found)


@rule(_FREEZE_CONFIG, *MODEL_FIELDS)
def model_freeze_config(parts: dict[str, Any] | None, *model: Any) -> RuleResult:
    """Refuses to freeze parts of a model that has such parts."""
    return why_not_frozen(model_fields(*model), {"freeze_config": parts})


@note("policy.model_name", "policy.hf_config?")
def model_name_is_a_label(name: str, fields: dict[str, Any] | None) -> RuleResult:
    """Notes that the weights of a model on the hub or in a folder are not read."""
    label = f"({name}) is a label: policy.hf_config is set, so weights are random; set that to null to read them"
    return None if fields is None or "/" not in name else label


@note("policy.trust_remote_code", "policy.model_name", "policy.tokenizer.name")
def model_remote_code(trusts: bool, model: str, tokenizer: str) -> RuleResult:
    """Notes that code which others wrote runs in this run's processes."""
    names = " and ".join(dict.fromkeys([model, tokenizer]))
    return f"is true: code in the files of {names} runs with your rights, where they have some" if trusts else None


@note(_FREEZE_CONFIG)
def model_freeze_config_of_text(parts: dict[str, Any] | None) -> RuleResult:
    """Notes that freeze_config has no effect: a rule, or the worker, refuses models that have such parts."""
    return "has no effect on a text-only model, as in NeMo-RL: all of its weights are trained" if parts else None
