"""Holds what absent keys stand for, and fills them in: the one place where a recipe's defaults are resolved."""

import copy
from collections.abc import Mapping
from typing import Any

# Full path of a key that may be absent: the value that it then has. A section comes before its keys.
IF_ABSENT: Mapping[str, Any] = {
    "policy.skip_model_check": False,
    "policy.max_skipped_steps": 0,
    "policy.refit_buffer_size_gb": 1.0,
    "policy.verify_refit": False,
    "policy.use_pinned_optimizer_offload": True,
    "policy.residency": {
        "verify": False,
        "huge_pages": True,
        "host_memory_limit_gib": None,
        "stream_window_mib": 512,
        "table": None,
    },
    "policy.residency.stream_window_mib": 512,
    "policy.activation_offload": {},
    "policy.activation_offload.strict": False,
    "policy.activation_offload.host_memory_limit_gib": None,
    "policy.numa": "auto",
    "checkpointing.on_damaged": "error",
    "checkpointing.grace_period_s": None,
    "data.train.split_validation_size": 0,
    "loss_fn.truncated_importance_sampling_type": None,
    "loss_fn.truncated_importance_sampling_ratio": None,
    "loss_fn.truncated_importance_sampling_ratio_min": None,
    "grpo.advantage_clip_low": None,
    "grpo.advantage_clip_high": None,
    "grpo.batch_multiplier": 1,
    "grpo.val_num_generations_per_prompt": 1,
    "grpo.reward_shaping.overlong_buffer_length": None,
    "grpo.reward_shaping.overlong_buffer_penalty": None,
    "grpo.reward_shaping.max_response_length": None,
    "grpo.reward_shaping.stop_properly_penalty_coef": None,
}

# The same for keys that a recipe of another algorithm must have or cannot have, by the algorithm's section.
IF_ABSENT_IN: Mapping[str, Mapping[str, Any]] = {
    "dpo": {"data.add_bos": True, "data.add_eos": True, "data.add_generation_prompt": False},
}


def resolve_absent_keys(config: dict[str, Any]) -> None:
    """Fill in the absent keys of the sections that a recipe has.

    Args:
        config: a recipe's, which is changed.
    """
    own = [values for section, values in IF_ABSENT_IN.items() if section in config]
    for path, value in [pair for values in (IF_ABSENT, *own) for pair in values.items()]:
        section, _, name = path.rpartition(".")
        found: Any = config
        for part in section.split("."):
            found = found[part] if isinstance(found, dict) and part in found else None
        if isinstance(found, dict):
            found.setdefault(name, copy.deepcopy(value))
