"""Models: what Megatron computes as transformers does."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.model.model_kind import model_fields
from nemo_offload_rl.config.model.unsupported_models import why_unsupported
from nemo_offload_rl.config.rules.base import MODEL_FIELDS, Verdict, rule


@rule(*MODEL_FIELDS)
def models_are_computed_as_transformers_does(
    model_name: str, hf_config: Mapping[str, Any] | None, overrides: Mapping[str, Any] | None
) -> Verdict:
    """Others would train as another model than the one that is exported."""
    found = why_unsupported(model_fields(model_name, hf_config, overrides))
    return None if found is None else ("policy.hf_config" if hf_config else "policy.model_name", found)
