"""Takes settings of several ranks out of `policy.megatron_cfg`, to build the same model on one rank."""

from collections.abc import Mapping
from typing import Any

_SIZES: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "moe_token_dispatcher_type": "alltoall",  # `flex` asserts that several ranks share the experts
}
_DEFAULT = frozenset(
    {
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "moe_enable_deepep",
        "moe_flex_dispatcher_backend",
        "moe_shared_expert_overlap",
    }
)
"""Fields that get megatron-core's default."""


def on_one_rank(megatron_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `policy.megatron_cfg` whose model has the same weights, all of them on one rank."""
    return {key: value for key, value in megatron_cfg.items() if key not in _DEFAULT} | dict(_SIZES)
