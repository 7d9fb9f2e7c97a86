"""Dense layers among the layers of experts of Qwen3-MoE: `mlp_only_layers` and `decoder_sparse_step`.

Without this Megatron-Bridge 0.6.2 builds experts in every layer, and has no names for the weights of dense ones.
"""

from typing import Any


def expert_layers(config: Any) -> list[int]:
    """For each layer of a Qwen3-MoE config 1 where it has experts, 0 where its MLP is dense."""
    return [
        int(layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0)
        for layer in range(config.num_hidden_layers)
    ]


def set_expert_layers(config: Any, provider: Any) -> None:
    """Set Megatron's field, and with Transformer Engine a spec that follows it; the local one does.

    A model of experts alone keeps what Megatron-Bridge gives it.
    """
    from megatron.bridge.models.gpt_provider import default_layer_spec

    layers = expert_layers(config)
    if all(layers):
        return
    assert provider.moe_layer_freq == 1 and provider.transformer_layer_spec is default_layer_spec
    provider.moe_layer_freq = layers
    provider.transformer_layer_spec = transformer_engine_block_spec


def transformer_engine_block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The spec of this stage's layers with Transformer Engine, each dense or of experts.

    Args:
        config: a `GPTModelProvider`.
        vp_stage: index of the virtual pipeline stage.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
