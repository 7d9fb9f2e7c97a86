"""Corrects what Megatron-Bridge 0.6.2 with megatron-core 0.19.2 computes differently from transformers 5.12.

The tested families are llama, mistral, qwen2, qwen3 and qwen3_moe. Others are left as Megatron-Bridge has them: the
check by a small twin finds out whether they are right.

Sets the activation function of MLPs as `hidden_act` says. Without this Megatron-Bridge 0.6.2 uses SiLU for Mistral
whatever the config says, and computes Llama with megatron-core's fused kernels, which have SiLU and, for GELU, only its
tanh approximation (log-probs off by 1e-4).

Adds the biases of linear layers: `attention_bias` (queries, keys, values and output) and `mlp_bias`. Megatron has one
field for the biases of queries, keys and values, and one for all linear layers at once. Without this Megatron-Bridge
0.6.2 leaves out the bias of attention's output projection and all biases of Qwen3, and has no weight names for any bias
of Llama.

Builds the dense layers among the expert layers of Qwen3-MoE: `mlp_only_layers` and `decoder_sparse_step`. Without this
Megatron-Bridge 0.6.2 builds experts in every layer, and has no names for the weights of dense layers.

Scales rotary embeddings with the frequencies and the attention factor that transformers computes. Without this
Megatron-Bridge 0.6.2 supports llama3 scaling only of Llama, with an original length of 8192 and default factors; leaves
out linear scaling of every family but Llama; and fails to build YaRN unless the config writes out six optional values.

A model is built with plain rotary embeddings, whose frequencies are then replaced. transformers multiplies the cosine
and sine of queries and of keys by the attention factor; here the softmax scale is multiplied by its square, which also
works where Transformer Engine's fused kernels take no factor.

Sets which layers have sliding-window attention, and how wide the window is. Without this Megatron-Bridge 0.6.2 leaves
out the windows of Qwen2 and Qwen3; those of Mistral it sets. Transformer Engine's attention reads Megatron's fields
layer by layer; so does `SdpaCoreAttention` in `local_spec`.

Registers Megatron-Bridge's classes of the tested model families with the corrections of this package. The corrected
classes replace the originals in Megatron-Bridge's own registry of architectures, so that every bridge of such a model
is a corrected one.
"""

import copy
import functools
import importlib
import importlib.metadata
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules
from torch import Tensor

from nemo_offload_rl.config.model.families import CORRECTED_FAMILIES, FAMILIES, FUSED_ACTIVATIONS, expert_layers
from nemo_offload_rl.mcore.patches.rotary import build_with_frequencies


def set_activation(bridge: Any, config: Any, provider: Any) -> None:
    """Set a provider's activation function, and switch a fused kernel off that would compute another one."""
    provider.activation_func = bridge.hf_to_megatron_activation(config.hidden_act)
    if config.hidden_act not in FUSED_ACTIVATIONS:
        provider.bias_activation_fusion = False


@dataclass(frozen=True)
class Biases:
    """Says which linear layers of a model have biases.

    Attributes:
        qkv: the projections to queries, keys and values.
        output: attention's output projection.
        mlp: both layers of dense MLPs.
    """

    qkv: bool
    output: bool
    mlp: bool


def biases_of(config: Any) -> Biases:
    """Reads the biases from a Hugging Face config of a family that `_Corrected` corrects."""
    family = FAMILIES[config.model_type]
    return Biases(
        qkv=bool(config.attention_bias) if family.qkv_bias is None else family.qkv_bias,
        output=bool(config.attention_bias) if family.output_bias is None else family.output_bias,
        mlp=bool(config.mlp_bias) if family.mlp_bias is None else family.mlp_bias,
    )


def add_biases(config: Any, provider: Any) -> None:
    """Make a finalized provider build its layers with the biases of a Hugging Face config."""
    biases = biases_of(config)
    if provider.add_bias_linear:
        return  # the recipe gives all linear layers biases
    if biases.output or biases.mlp:
        provider.transformer_layer_spec = with_biases(provider.transformer_layer_spec, biases)


def with_biases(spec: Callable[..., Any] | ModuleSpec, biases: Biases) -> Callable[..., Any]:
    """Returns a function that makes the spec of a stage's layers, with biases that Megatron has no fields for.

    Args:
        spec: `transformer_layer_spec` of a provider, which makes new layer specs at each call.
        biases: the model's biases.
    """

    def biased(config: Any, vp_stage: int | None = None) -> Any:
        made = _call(spec, config, vp_stage)
        layers = made.layer_specs if hasattr(made, "layer_specs") else [made]
        for layer in {id(layer): layer for layer in layers}.values():
            parts = layer.submodules
            if biases.output:
                attention: Any = get_submodules(parts.self_attention)
                attention.linear_proj = _always_biased(attention.linear_proj)
            if biases.mlp:
                mlp: Any = get_submodules(parts.mlp)
                mlp.linear_fc1, mlp.linear_fc2 = _always_biased(mlp.linear_fc1), _always_biased(mlp.linear_fc2)
        return made

    return biased


def _call(spec: Callable[..., Any] | ModuleSpec, config: Any, vp_stage: int | None) -> Any:
    """Calls a layer-spec function as `GPTModelProvider.provide` does."""
    assert not isinstance(spec, ModuleSpec), "a spec that is shared between models cannot be changed"
    return spec(config, vp_stage=vp_stage) if "vp_stage" in inspect.signature(spec).parameters else spec(config)


def _always_biased(linear: type) -> type:
    """Returns a subclass of a linear layer that always has a bias, with the same name, which Megatron-Bridge reads."""
    assert isinstance(linear, type), (
        f"{linear} is not a class, so this is not the layer spec that this module was written for"
    )

    def __init__(self: Any, *args: Any, bias: bool, **kwargs: Any) -> None:
        linear.__init__(self, *args, bias=True, **kwargs)  # type: ignore[misc]

    return type(linear.__name__, (linear,), {"__init__": __init__, "__module__": __name__})


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


def transformer_engine_block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the Transformer Engine spec of this stage's layers, each dense or with experts.

    Args:
        config: a `GPTModelProvider`.
        vp_stage: index of the virtual pipeline stage.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


# Types of `rope_parameters` whose frequencies do not depend on the sequence.
SCALED = ("linear", "llama3", "yarn")
PLAIN = "default"


def rope_type(config: Any) -> str:
    """Returns the type of rotary embedding of a Hugging Face config."""
    parameters = config.rope_parameters
    return str(parameters["rope_type"]) if "rope_type" in parameters else PLAIN


def without_scaling(config: Any) -> Any:
    """Returns a copy of a Hugging Face config whose rotary embeddings are plain, with the same base."""
    plain = copy.deepcopy(config)
    plain.rope_parameters = {"rope_type": PLAIN, "rope_theta": config.rope_parameters["rope_theta"]}
    return plain


def frequencies(config: Any) -> tuple[Tensor, float]:
    """Returns the inverse frequencies float32 [head_dim / 2] and the attention factor of a config with scaling.

    The config's type must be in `SCALED`. In the corrected families rotary embeddings rotate whole heads.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, factor = ROPE_INIT_FUNCTIONS[rope_type(config)](config, device=torch.device("cpu"))
    return inverse, float(factor)


def scale(config: Any, provider: Any) -> None:
    """Make a provider build models with the rotary scaling of a Hugging Face config; without scaling do nothing.

    Args:
        config: Hugging Face config of a family that `_Corrected` corrects.
        provider: made from the config's copy `without_scaling`.
    """
    if rope_type(config) == PLAIN:
        return
    assert rope_type(config) in SCALED, "other RoPE types are refused before"
    inverse, factor = frequencies(config)
    assert provider.position_embedding_type == "rope" and not provider.rope_scaling
    assert provider.seq_len_interpolation_factor is None and provider.softmax_scale is None
    if factor != 1.0:
        provider.softmax_scale = factor**2 / math.sqrt(2 * len(inverse))
    build_with_frequencies(provider, inverse)


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
        provider = super().provider_bridge(SimpleNamespace(config=without_scaling(config)))  # type: ignore[misc]
        provider.rotary_percent = 1.0  # transformers ignores `partial_rotary_factor` for these families
        scale(config, provider)
        set_activation(self, config, provider)
        set_windows(config, provider)
        has = biases_of(config)
        provider.add_qkv_bias, provider.add_bias_linear = has.qkv, False
        if FAMILIES[config.model_type].experts:
            set_expert_layers(config, provider)
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
