"""Makes the policy section for the twin: one rank, without the settings that move memory or train."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.megatron import on_one_rank
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.model_check.twin import ROW_LENGTH

# More keys of megatron_cfg that only set where and when something is computed, or that have no counterpart in
# transformers: token dropping, router losses. Each gets this value, or is removed if the value is None.
_ALONE: Mapping[str, Any] = {
    "activation_checkpointing": False,
    "freeze_moe_router": False,
    "fine_grained_activation_offloading": False,
    "offload_modules": None,
    "delay_offload_until_cuda_graph": None,
    "gradient_accumulation_fusion": False,  # it writes gradients to buffers that this check does not read
    "cuda_graph_impl": "none",
    "cuda_graph_modules": None,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_input_jitter_eps": None,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": None,
    "moe_token_drop_policy": None,
    "env_vars": None,
    "checkpoint": None,
    "optimizer": None,
    "scheduler": None,
    "distributed_data_parallel_config": None,
}


def alone(policy: PolicyConfig, twin: Mapping[str, Any]) -> PolicyConfig:
    """Returns the twin's policy section: the run's layer spec, fusions and expert settings, on one rank.

    Args:
        policy: the recipe's policy section.
        twin: the twin's Hugging Face config.

    Returns:
        A section from which `mcore.model.model_config` builds a model, in float32.
    """
    run = on_one_rank(policy["megatron_cfg"])
    megatron = {key: value for key, value in run.items() if key not in _ALONE}
    megatron |= {key: value for key, value in _ALONE.items() if value is not None}
    frequency = megatron.get("moe_layer_freq")
    if "mlp_only_layers" in twin:
        megatron.pop("moe_layer_freq", None)  # the run's value is for the model's layers, not the twin's
    elif isinstance(frequency, list):
        megatron["moe_layer_freq"] = frequency[: twin["num_hidden_layers"]]
    section: Any = {
        "model_name": policy["model_name"],
        "hf_config": dict(twin),
        "precision": "float32",
        "max_total_sequence_length": ROW_LENGTH,
        "logprob_chunk_size": None,  # the model's own build reports logits that cannot be chunked
        "sequence_packing": {"enabled": False},
        "megatron_cfg": megatron,
    }
    return section
