"""Counts the floating-point operations that a model needs for given sequences: model FLOPs, for their utilisation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.plan.architecture import Architecture, UnknownArchitectureError, read_architecture

# Forward, and in the backward pass the gradients of the inputs and of the weights of each product.
TRAINING_PASSES = 3

# Families of which `layer_types` names the layers with a sliding window; of the others all layers have it.
_WINDOWS_BY_LAYER = ("qwen2", "qwen3")


@dataclass(frozen=True)
class FlopModel:
    """Counts the FLOPs of a model's forward passes.

    Attributes:
        architecture: sizes of the model.
        windows: for each layer the tokens that a token attends to at most, itself included; None for all before it.
        precision: `policy.precision`, in which products are computed.
    """

    architecture: Architecture
    windows: tuple[int | None, ...]
    precision: str

    @property
    def per_token(self) -> int:
        """FLOPs of a forward pass over a token, without the scores of attention.

        A product of a vector with an m x n matrix takes 2mn. With hidden size h, n heads and g groups of queries of
        size d, MLP size f, vocabulary V, E experts and k of them active:

            attention's projections  2h(n + 2g)d + 2ndh       of each layer
            dense MLP, gated         6hf                      of each layer without experts
            experts                  6hfk + 2hE (the router)  of each layer with experts
            output layer             2hV                      once, tied embeddings or not; looking them up is free

        Norms, activations, softmax and rotary embeddings are left out, as the sources do: Narayanan et al., "Efficient
        Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 5.1 and appendix;
        Chowdhery et al., "PaLM" (2022), appendix B.
        """
        model = self.architecture
        hidden, heads = model.hidden_size, model.num_heads * model.head_dim
        attention = 2 * hidden * (heads + 2 * model.num_query_groups * model.head_dim) + 2 * heads * hidden
        dense = 6 * hidden * model.dense_ffn_hidden_size
        experts = 6 * hidden * model.ffn_hidden_size * (model.experts_per_token or 0)
        experts += 2 * hidden * (model.num_experts or 0)
        num_with_experts = sum(model.expert_layers)
        mlps = num_with_experts * experts + (model.num_layers - num_with_experts) * dense
        return model.num_layers * attention + mlps + 2 * hidden * model.vocab_size

    def forward_flops(self, lengths: Iterable[int]) -> int:
        """FLOPs of a forward pass over sequences, with those of attention's scores.

        A pair of tokens takes 4nd a layer: 2nd for its scores and 2nd for its share of the values. A sequence of S
        tokens has S(S + 1)/2 pairs, since attention is causal; PaLM's appendix counts S x S.

        Args:
            lengths: tokens of each sequence, without padding, which is no work of the model.
        """
        model = self.architecture
        per_pair = 4 * model.num_heads * model.head_dim
        return sum(
            length * self.per_token + per_pair * sum(attention_pairs(length, window) for window in self.windows)
            for length in lengths
        )


def attention_pairs(length: int, window: int | None = None) -> int:
    """Counts the pairs of a token and one that it attends to, itself included.

    Args:
        length: tokens of the sequence.
        window: the most tokens that a token attends to; None for all before it.
    """
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def read_flop_model(hf_config: Mapping[str, Any], policy: Mapping[str, Any]) -> FlopModel:
    """Returns what a model's FLOPs follow from.

    Args:
        hf_config: its Hugging Face config with every field, as its `to_dict()` gives it.
        policy: the recipe's section, whose `megatron_cfg` goes before the fields of the model.

    Raises:
        UnknownArchitectureError: a family, or a field, that is not counted.
        ValueError: a field that its family has is missing, or is no size.
    """
    model = read_architecture(hf_config, policy["megatron_cfg"])
    window = hf_config.get("sliding_window")
    windowed = [window is not None] * model.num_layers
    if window is not None and hf_config["model_type"] in _WINDOWS_BY_LAYER:
        windowed = [kind == "sliding_attention" for kind in hf_config["layer_types"][: model.num_layers]]
    return FlopModel(model, tuple(window if has else None for has in windowed), policy["precision"])


def flop_model_if_known(hf_config: Mapping[str, Any], policy: Mapping[str, Any]) -> FlopModel | None:
    """As `read_flop_model`, but None for a family, or a field, that is not counted."""
    try:
        return read_flop_model(hf_config, policy)
    except UnknownArchitectureError:
        return None
