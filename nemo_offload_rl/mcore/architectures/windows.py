"""Sets which layers have sliding-window attention, and how wide the window is.

Without this Megatron-Bridge 0.6.2 leaves out the windows of Qwen2 and Qwen3; those of Mistral it sets. Transformer
Engine's attention reads Megatron's fields layer by layer; so does `SdpaCoreAttention` in `local_spec`.
"""

from typing import Any

from nemo_offload_rl.config.model.families import FAMILIES


def windowed_layers(config: Any) -> list[bool]:
    """Returns for each layer of a Hugging Face config whether it has a sliding window."""
    window = config.sliding_window if hasattr(config, "sliding_window") else None
    if window is None:
        return [False] * config.num_hidden_layers
    if not FAMILIES[config.model_type].windows_by_layer:
        return [True] * config.num_hidden_layers
    return [kind == "sliding_attention" for kind in config.layer_types[: config.num_hidden_layers]]


def set_windows(config: Any, provider: Any) -> None:
    """Set a provider's window fields: Megatron counts the tokens before a token, Hugging Face also the token itself."""
    windowed = windowed_layers(config)
    if not any(windowed):
        provider.window_size = provider.window_attn_skip_freq = None
        return
    provider.window_size = (config.sliding_window - 1, 0)
    provider.window_attn_skip_freq = None if all(windowed) else [int(has) for has in windowed]
