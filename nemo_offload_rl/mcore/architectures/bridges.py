"""Registers Megatron-Bridge's classes of the tested model families with the corrections of this package.

The corrected classes replace the originals in Megatron-Bridge's own registry of architectures, so that every bridge of
such a model is a corrected one.
"""

import functools
import importlib
import importlib.metadata
from types import SimpleNamespace
from typing import Any

from nemo_offload_rl.config.model.families import CORRECTED_FAMILIES, FAMILIES
from nemo_offload_rl.mcore.architectures import activations, biases, dense_layers, rotary, windows

WRITTEN_FOR = {"megatron-core": "0.19.2", "megatron-bridge": "0.6.2"}


_LAYER, _HF_LAYER = "decoder.layers.*", "model.layers.*"


def is_corrected(config: Any) -> bool:
    """Return whether this package corrects the family of a Hugging Face config."""
    return config.model_type in CORRECTED_FAMILIES


@functools.cache
def register() -> None:
    """Replace Megatron-Bridge's classes by the corrected ones; `megatron.bridge` must have been imported."""
    for package, version in WRITTEN_FOR.items():
        found = importlib.metadata.version(package)
        assert found == version, (
            f"{__name__} was written for {package} {version}, but {found} is installed: test it again"
        )
    import transformers
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, get_model_bridge
    from megatron.core.models.gpt.gpt_model import GPTModel

    for name in CORRECTED_FAMILIES:
        module, _, bridge_name = str(FAMILIES[name].bridge).partition(":")
        bridge = getattr(importlib.import_module(f"megatron.bridge.models.{module}"), bridge_name)
        source = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[name]]
        assert source in get_model_bridge._exact_types, f"Megatron-Bridge has no bridge for {source.__name__}"
        corrected = type(bridge.__name__, (_Corrected, bridge), {"__module__": __name__})
        MegatronModelBridge.register_bridge(source=source, target=GPTModel, model_type=bridge.MODEL_TYPE)(corrected)


class _Corrected:
    """Corrects a class of Megatron-Bridge, as a base class in front of it."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return the provider of Megatron-Bridge's class, with its fields corrected to agree with the config.

        Args:
            hf_pretrained: has the Hugging Face config as `config`.
        """
        config = hf_pretrained.config
        provider = super().provider_bridge(SimpleNamespace(config=rotary.without_scaling(config)))  # type: ignore[misc]
        provider.rotary_percent = 1.0  # transformers ignores `partial_rotary_factor` for these families
        rotary.scale(config, provider)
        activations.set_activation(self, config, provider)
        windows.set_windows(config, provider)
        has = biases.biases_of(config)
        provider.add_qkv_bias, provider.add_bias_linear = has.qkv, False
        if FAMILIES[config.model_type].experts:
            dense_layers.set_expert_layers(config, provider)
        return provider

    def mapping_registry(self) -> Any:
        """Return the weight mappings of Megatron-Bridge's class, and those that it lacks."""
        from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

        known = super().mapping_registry().mappings  # type: ignore[misc]
        names = {mapping.megatron_param for mapping in known}
        return MegatronMappingRegistry(*known, *(new for new in _mappings() if new.megatron_param not in names))


def _mappings() -> list[Any]:
    """Returns mappings of weights that some family has and its bridge lacks: of all biases, and of dense layers."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping

    attention, mlp = f"{_LAYER}.self_attention", f"{_LAYER}.mlp"
    hf_attention, hf_mlp = f"{_HF_LAYER}.self_attn", f"{_HF_LAYER}.mlp"
    return [
        QKVMapping(f"{attention}.linear_qkv.bias", *(f"{hf_attention}.{name}_proj.bias" for name in ("q", "k", "v"))),
        AutoMapping(f"{attention}.linear_proj.bias", f"{hf_attention}.o_proj.bias"),
        GatedMLPMapping(f"{mlp}.linear_fc1.weight", f"{hf_mlp}.gate_proj.weight", f"{hf_mlp}.up_proj.weight"),
        GatedMLPMapping(f"{mlp}.linear_fc1.bias", f"{hf_mlp}.gate_proj.bias", f"{hf_mlp}.up_proj.bias"),
        AutoMapping(f"{mlp}.linear_fc2.weight", f"{hf_mlp}.down_proj.weight"),
        AutoMapping(f"{mlp}.linear_fc2.bias", f"{hf_mlp}.down_proj.bias"),
        AutoMapping(f"{mlp}.linear_fc1.layer_norm_weight", f"{_HF_LAYER}.post_attention_layernorm.weight"),
    ]
