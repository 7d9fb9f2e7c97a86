"""Counts the model FLOPs of given sequences, from which model-FLOP utilisation (MFU) is computed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config.model.families import family_of
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.plan.architecture import Architecture, UnknownArchitectureError, read_architecture

# The forward pass, and for each matrix product of it two in the backward pass: gradients of the inputs and the weights.
TRAINING_PASSES = 3


@dataclass(frozen=True)
class FlopModel:
    """Counts the FLOPs of a model's forward passes.

    Attributes:
        architecture: sizes of the model.
        windows: for each layer, the most tokens that a token attends to, including itself; None for no limit.
        precision: `policy.precision`, in which matrix products are computed.
    """

    architecture: Architecture
    windows: tuple[int | None, ...]
    precision: str

    @property
    def per_token(self) -> int:
        """Returns the FLOPs of a forward pass over one token, without attention's scores.

        A product of a vector with an m x n matrix takes 2mn. With hidden size h, n heads and g query groups of head
        size d, MLP size f, vocabulary V, E experts and k of them active:

            attention's projections  2h(n + 2g)d + 2ndh       of each layer
            dense MLP, gated         6hf                      of each layer without experts
            experts                  6hfk + 2hE (the router)  of each layer with experts
            output layer             2hV                      once, tied embeddings or not; the lookup counts nothing

        Norms, activations, softmax and rotary embeddings are left out, as the sources do: Narayanan et al., "Efficient
        Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 5.1 and appendix;
        Chowdhery et al., "PaLM" (2022), appendix B.
        """
        model = self.architecture
        hidden, heads = model.hidden_size, model.num_heads * model.head_dim
        attention = 2 * hidden * (heads + 2 * model.num_query_groups * model.head_dim) + 2 * heads * hidden
        return model.num_layers * attention + self.mlp_per_token + self.output_per_token

    @property
    def mlp_per_token(self) -> int:
        """Returns the part of `per_token` that MLPs, experts and routers take."""
        model, hidden = self.architecture, self.architecture.hidden_size
        dense = 6 * hidden * model.dense_ffn_hidden_size
        experts = 6 * hidden * model.ffn_hidden_size * (model.experts_per_token or 0)
        experts += 2 * hidden * (model.num_experts or 0)
        num_with_experts = sum(model.expert_layers)
        return num_with_experts * experts + (model.num_layers - num_with_experts) * dense

    @property
    def output_per_token(self) -> int:
        """Returns the part of `per_token` that the output layer takes."""
        return 2 * self.architecture.hidden_size * self.architecture.vocab_size

    def forward_flops(self, lengths: Iterable[int]) -> int:
        """Returns the FLOPs of a forward pass over sequences, including attention's scores.

        Args:
            lengths: tokens of each sequence, without padding, since padding is not useful work.
        """
        return sum(length * self.per_token + self.attention_flops(length) for length in lengths)

    def attention_flops(self, length: int) -> int:
        """Returns the FLOPs of attention's scores and values, in a forward pass over one sequence.

        A pair of tokens takes 4nd a layer: 2nd for its score and 2nd for its share of the values. A sequence of S
        tokens has S(S + 1)/2 pairs, since attention is causal; PaLM's appendix counts S x S.

        Args:
            length: tokens of the sequence.
        """
        per_pair = 4 * self.architecture.num_heads * self.architecture.head_dim
        return per_pair * sum(attention_pairs(length, window) for window in self.windows)


def attention_pairs(length: int, window: int | None = None) -> int:
    """Counts the pairs of a token and a token that it attends to; a token attends to itself, too.

    Args:
        length: tokens of the sequence.
        window: the most tokens that a token attends to, including itself; None for no limit.
    """
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def read_flop_model(hf_config: Mapping[str, Any], policy: PolicyConfig) -> FlopModel:
    """Reads from a model's config the sizes that its FLOPs are computed from.

    Args:
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        policy: the recipe's `policy` section, whose `megatron_cfg` overrides the fields of the model.

    Raises:
        UnknownArchitectureError: the model's family is not supported here, or a field has a value that is not.
        ValueError: the config lacks a field that the family needs, or the field is not a valid size.
    """
    model = read_architecture(hf_config, policy["megatron_cfg"])
    window = hf_config.get("sliding_window")
    windowed = [window is not None] * model.num_layers
    if window is not None and family_of(hf_config).windows_by_layer:
        windowed = [kind == "sliding_attention" for kind in hf_config["layer_types"][: model.num_layers]]
    return FlopModel(model, tuple(window if has else None for has in windowed), policy["precision"])


def flop_model_if_known(hf_config: Mapping[str, Any], policy: PolicyConfig) -> FlopModel | None:
    """Does the same as `read_flop_model`, but returns None instead of raising UnknownArchitectureError."""
    try:
        return read_flop_model(hf_config, policy)
    except UnknownArchitectureError:
        return None
