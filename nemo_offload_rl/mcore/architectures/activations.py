"""Activation functions of MLPs: `hidden_act`.

Without this Megatron-Bridge 0.6.2 takes SiLU for Mistral whatever the config says, and has Llama computed by
megatron-core's fused kernels, which know SiLU, and for GELU only its approximation by tanh (log-probs off by 1e-4).
"""

from typing import Any

from nemo_offload_rl.config.model.unsupported_models import FUSED_ACTIVATIONS


def set_activation(bridge: Any, config: Any, provider: Any) -> None:
    """Set a provider's activation function, without a kernel that computes another."""
    provider.activation_func = bridge.hf_to_megatron_activation(config.hidden_act)
    if config.hidden_act not in FUSED_ACTIVATIONS:
        provider.bias_activation_fusion = False
