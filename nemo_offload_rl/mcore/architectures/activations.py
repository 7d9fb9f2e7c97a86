"""Sets the activation function of MLPs as `hidden_act` says.

Without this Megatron-Bridge 0.6.2 uses SiLU for Mistral whatever the config says, and computes Llama with
megatron-core's fused kernels, which have SiLU and, for GELU, only its tanh approximation (log-probs off by 1e-4).
"""

from typing import Any

from nemo_offload_rl.config.model.families import FUSED_ACTIVATIONS


def set_activation(bridge: Any, config: Any, provider: Any) -> None:
    """Set a provider's activation function, and switch a fused kernel off that would compute another one."""
    provider.activation_func = bridge.hf_to_megatron_activation(config.hidden_act)
    if config.hidden_act not in FUSED_ACTIVATIONS:
        provider.bias_activation_fusion = False
