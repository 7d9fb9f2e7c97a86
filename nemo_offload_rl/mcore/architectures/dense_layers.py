"""Builds the dense layers among the expert layers of Qwen3-MoE: `mlp_only_layers` and `decoder_sparse_step`.

Without this Megatron-Bridge 0.6.2 builds experts in every layer, and has no names for the weights of dense layers.
"""

from typing import Any

from nemo_offload_rl.config.megatron import megatron_field
from nemo_offload_rl.config.model.families import expert_layers
from nemo_offload_rl.config.schema.megatron import MegatronConfig


def set_expert_layers(config: Any, provider: Any) -> None:
    """Set a provider's `moe_layer_freq`, and a Transformer Engine layer spec that follows it.

    The local layer spec follows it anyway. A model with experts in all layers keeps Megatron-Bridge's settings.
    """
    from megatron.bridge.models.gpt_provider import default_layer_spec

    layers = expert_layers(config.to_dict())
    if layers is None or all(layers):
        return
    assert provider.moe_layer_freq == 1 and provider.transformer_layer_spec is default_layer_spec
    provider.moe_layer_freq = [int(has) for has in layers]
    provider.transformer_layer_spec = transformer_engine_block_spec


def check_layers(megatron_cfg: MegatronConfig, provider: Any) -> None:
    """Refuse a `moe_layer_freq` of the recipe that differs from the model's, whose weights are of other layers.

    Args:
        megatron_cfg: the recipe's `policy.megatron_cfg`.
        provider: as Megatron-Bridge made it from the model's config.

    Raises:
        ValueError: they differ.
    """
    wanted = megatron_field(megatron_cfg, "moe_layer_freq")
    if wanted is None or provider.num_moe_experts is None:
        return
    asked, has = (_by_layer(freq, provider.num_layers) for freq in (wanted, provider.moe_layer_freq))
    if asked != has:
        raise ValueError(
            f"policy.megatron_cfg.moe_layer_freq is {wanted}, but mlp_only_layers and decoder_sparse_step of the "
            f"model give {_shown(has)} (1 for a layer with experts); leave it out, or change these two in "
            "policy.hf_config_overrides."
        )


def _by_layer(freq: int | list[int], num_layers: int) -> list[int]:
    """Returns 1 for each layer with experts and 0 for others, as `get_gpt_decoder_layer_specs` reads the field."""
    return list(freq) if isinstance(freq, list) else [int(layer % freq == 0) for layer in range(num_layers)]


def _shown(layers: list[int]) -> str:
    return str(layers) if len(layers) <= 64 else f"{str(layers[:64])[:-1]}, ...]"


def transformer_engine_block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the Transformer Engine spec of this stage's layers, each dense or with experts.

    Args:
        config: a `GPTModelProvider`.
        vp_stage: index of the virtual pipeline stage.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
