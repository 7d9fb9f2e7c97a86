"""Rules for models that Megatron does not compute as transformers does, or cannot freeze in part."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.model.model_kind import model_fields
from nemo_offload_rl.config.model.unsupported_models import why_not_frozen, why_unsupported
from nemo_offload_rl.config.rules.base import MEGATRON, MODEL_FIELDS, Verdict, rule


@rule(*MODEL_FIELDS)
def models_are_computed_as_transformers_does(
    model_name: str, hf_config: Mapping[str, Any] | None, overrides: Mapping[str, Any] | None
) -> Verdict:
    """Refuses a model that would train as a different model than the exported one."""
    found = why_unsupported(model_fields(model_name, hf_config, overrides))
    return None if found is None else ("policy.hf_config" if hf_config else "policy.model_name", found)


@rule(f"{MEGATRON}.freeze_config?", *MODEL_FIELDS)
def only_models_without_towers_are_frozen(
    parts: dict[str, Any] | None,
    model_name: str,
    hf_config: Mapping[str, Any] | None,
    overrides: Mapping[str, Any] | None,
) -> Verdict:
    """Refuses to freeze parts of a model that has such parts."""
    return why_not_frozen(model_fields(model_name, hf_config, overrides), {"freeze_config": parts})
