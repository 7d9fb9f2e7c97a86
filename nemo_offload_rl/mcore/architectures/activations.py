"""Activation functions of MLPs: `hidden_act`.

Without this Megatron-Bridge 0.6.2 takes SiLU for Mistral whatever the config says, and has Llama computed by
megatron-core's fused kernels, which know SiLU, and for GELU only its approximation by tanh (log-probs off by 1e-4).
"""

from typing import Any

_FUSED = ("silu", "swish")


def set_activation(bridge: Any, config: Any, provider: Any) -> None:
    """Set a provider's activation function, without a kernel that computes another."""
    provider.activation_func = bridge.hf_to_megatron_activation(config.hidden_act)
    if config.hidden_act not in _FUSED:
        provider.bias_activation_fusion = False


def check_activation(config: Any, provider: Any) -> None:
    """Refuse the fused kernel where a recipe asks for it and the model has another activation function.

    Raises:
        ValueError: it does.
    """
    if provider.bias_activation_fusion and config.hidden_act not in _FUSED:
        raise ValueError(
            f"policy.megatron_cfg.bias_activation_fusion is true, but the model's hidden_act is {config.hidden_act!r}, "
            "which megatron-core's fused kernel does not compute exactly; set it to false."
        )
