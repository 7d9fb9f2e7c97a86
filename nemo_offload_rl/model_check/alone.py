"""The recipe's policy section as the twin is built with: on one rank, without what moves memory or trains."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.model_check.twin import ROW_LENGTH

# Keys of megatron_cfg that say where and when something is computed, or what transformers has no counterpart of: what a
# token's experts drop, losses of routers. They get these values, or are left out where that is None.
_ALONE: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": None,
    "account_for_loss_in_pipeline_split": None,
    "pipeline_model_parallel_layout": None,
    "overlap_p2p_comm": None,
    "batch_p2p_comm": None,
    "activation_checkpointing": False,
    "freeze_moe_router": False,
    "fine_grained_activation_offloading": False,
    "offload_modules": None,
    "delay_offload_until_cuda_graph": None,
    "gradient_accumulation_fusion": False,  # it writes gradients where nothing here reads them
    "cuda_graph_impl": "none",
    "cuda_graph_modules": None,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_input_jitter_eps": None,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": None,
    "moe_token_drop_policy": None,
    "moe_token_dispatcher_type": "alltoall",
    "moe_enable_deepep": None,
    "moe_flex_dispatcher_backend": None,
    "moe_shared_expert_overlap": None,
    "env_vars": None,
    "checkpoint": None,
    "optimizer": None,
    "scheduler": None,
    "distributed_data_parallel_config": None,
}


def alone(policy: Mapping[str, Any], twin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the twin's policy section: the run's layer specification, fusions and settings of experts, on one rank.

    Args:
        policy: the recipe's policy section.
        twin: the twin's Hugging Face config.

    Returns:
        A section that `mcore.model.model_config` makes a model of, in float32.
    """
    run: Mapping[str, Any] = policy["megatron_cfg"]
    megatron = {key: value for key, value in run.items() if key not in _ALONE}
    megatron |= {key: value for key, value in _ALONE.items() if value is not None}
    frequency = megatron.get("moe_layer_freq")
    if "mlp_only_layers" in twin:
        megatron.pop("moe_layer_freq", None)  # the run's must say of the model what these say of the twin
    elif isinstance(frequency, list):
        megatron["moe_layer_freq"] = frequency[: twin["num_hidden_layers"]]
    return {
        "model_name": policy["model_name"],
        "hf_config": dict(twin),
        "precision": "float32",
        "max_total_sequence_length": ROW_LENGTH,
        "logprob_chunk_size": None,  # where the model's logits cannot be in chunks, its own build says so
        "megatron_cfg": megatron,
    }
