"""Adds the biases of linear layers: `attention_bias` (queries, keys, values and output) and `mlp_bias`.

Megatron has one field for the biases of queries, keys and values, and one for all linear layers at once. Without this
Megatron-Bridge 0.6.2 leaves out the bias of attention's output projection and all biases of Qwen3, and has no weight
names for any bias of Llama.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules

from nemo_offload_rl.config.model.families import FAMILIES


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
    """Reads the biases from a Hugging Face config of a family that `bridges` corrects."""
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
