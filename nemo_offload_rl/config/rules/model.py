"""Rules for the model: Megatron-Bridge can build it, and Megatron computes it as transformers does."""

from typing import Any

from nemo_offload_rl.config.installed.bridges import bridged_architectures
from nemo_offload_rl.config.installed.transformers_source import causal_models
from nemo_offload_rl.config.model.model_kind import model_fields
from nemo_offload_rl.config.model.unsupported_models import why_not_frozen, why_unsupported
from nemo_offload_rl.config.problems import nearest, show_choices
from nemo_offload_rl.config.rules.base import MEGATRON, MODEL_FIELDS, RuleResult, note, rule

_FREEZE_CONFIG = f"{MEGATRON}.freeze_config?"
_SECTIONS = ("policy.hf_config_overrides", "policy.hf_config")


@rule(*MODEL_FIELDS)
def model_bridge(*model: Any) -> RuleResult:
    """Refuses architectures that Megatron-Bridge does not translate."""
    fields = model_fields(*model)
    named, model_type = fields.get("architectures"), fields.get("model_type")
    key = "architectures" if named else "model_type"
    written = zip(_SECTIONS, model[:0:-1], strict=True)
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
    close = nearest(architectures[0], bridged)
    hint = f"; did you mean {close}?" if close and named else ""
    path = next((f"{section}.{key}" for section, given in written if key in (given or {})), "policy.model_name")
    return path, (
        f"the model is {show_choices(architectures)}, which the installed Megatron-Bridge cannot build{hint}; "
        f"families that it can: {', '.join(families)}"
    )


@rule(*MODEL_FIELDS)
def model_computed_as_transformers(*model: Any) -> RuleResult:
    """Refuses a model that would train as a different model than the exported one."""
    found = why_unsupported(model_fields(*model))
    return None if found is None else ("policy.hf_config" if model[1] else "policy.model_name", found)


@rule(_FREEZE_CONFIG, *MODEL_FIELDS)
def model_freeze_config(parts: dict[str, Any] | None, *model: Any) -> RuleResult:
    """Refuses to freeze parts of a model that has such parts."""
    return why_not_frozen(model_fields(*model), {"freeze_config": parts})


@note(_FREEZE_CONFIG)
def model_freeze_config_of_text(parts: dict[str, Any] | None) -> RuleResult:
    """Notes that freeze_config has no effect: a rule, or the worker, refuses models that have such parts."""
    return "has no effect on a text-only model, as in NeMo-RL: all of its weights are trained" if parts else None
