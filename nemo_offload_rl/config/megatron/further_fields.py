"""Reads fields of `policy.megatron_cfg` and its sections that the schema does not name, or that have no value there."""

from collections.abc import Mapping
from typing import Any

# megatron-core's defaults, as a recipe writes them. Of the other fields that are read here, absent means null, or what
# the model's own config says.
DEFAULTS: Mapping[str, Any] = {
    "bias_activation_fusion": False,
    "exp_avg_dtype": "float32",
    "exp_avg_sq_dtype": "float32",
    "main_params_dtype": "float32",
    "moe_pad_expert_input_to_capacity": False,
    "pad_buckets_for_high_nccl_busbw": False,
    "param_name_patterns_for_fp32_local_accumulation": (),
    "store_param_remainders": True,
    "use_transformer_engine_op_fuser": False,
}


def megatron_field(section: Mapping[str, Any], name: str) -> Any:
    """Returns a field of a section; where it is absent or null, megatron-core's default, or None.

    Args:
        section: the recipe's `policy.megatron_cfg`, or its `optimizer` or `distributed_data_parallel_config`.
        name: the field.
    """
    value = section[name] if name in section else None
    return DEFAULTS[name] if value is None and name in DEFAULTS else value
