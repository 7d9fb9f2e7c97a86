"""Lists the tensors that autograd saves in each module, per layer and micro-batch.

The lists follow the code of megatron-core 0.19.2 (`core`) and Transformer Engine 2.20 (`TE`) without fp8; each function
names file and line. Tensors that share a storage have the same name, whichever modules save them. Not modelled:

- TE's unfused attention, which saves the scores, tokens x tokens a head (TE chooses it for float32);
- flash-attn on padded rows with several samples: the output that it saves and the one that `attn_proj` saves are then
  two storages, since it works on [batch, sequence] and copies its output back (TE backends.py 1436). cuDNN's attention,
  which TE prefers on Hopper, shares one storage; so does attention on packed rows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_FP32_BYTES = 4


@dataclass(frozen=True)
class ActivationFacts:
    """Holds the activation sizes of one rank of a pipeline stage; of what is split over ranks, the rank's own share."""

    num_tokens: int
    """Tokens of a micro-batch in attention, including padding."""
    num_residual_tokens: int
    """Tokens of a micro-batch between the sublayers: `num_tokens`, divided by the tensor-parallel size with sequence
    parallelism."""
    num_expert_tokens: int
    """Token copies of a micro-batch that are routed to this rank's experts on average; 0 for a dense model."""
    hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    qk_norm: bool
    """Whether queries and keys are normalised."""
    expert_ffn_size: int
    """FFN size of one expert, without its gate; 0 for a dense model."""
    fused_swiglu: bool
    """Whether bias and activation are one kernel (bias_activation_fusion)."""
    element_size: int
    """Bytes of an activation's element."""
    num_layers: int
    """Layers of the whole stage."""
    num_model_chunks: int
    """Virtual stages; 1 without."""
    num_chunks_in_flight: int
    """The most model-chunk forward passes that wait for their backward pass: see
    `plan.activations.chunks_in_flight`."""
    num_layers_of_segment: int = 1
    """Layers that full recomputation takes at a time (recompute_num_layers)."""
    receives_input: bool = False
    """Whether the input of the stage's first layer comes from another stage; the schedule then holds it."""

    @property
    def residual_bytes(self) -> int:
        """Bytes of the hidden states of a micro-batch between the sublayers."""
        return self.num_residual_tokens * self.hidden_size * self.element_size

    @property
    def is_moe(self) -> bool:
        """Whether the MLPs are mixtures of experts."""
        return self.expert_ffn_size > 0


@dataclass(frozen=True)
class SavedTensor:
    """Describes a storage that autograd saves for the backward pass.

    Attributes:
        name: identifies the storage in its layer; tensors that share a storage have the same name.
        num_elements: elements per micro-batch.
        element_size: bytes per element.
    """

    name: str
    num_elements: int
    element_size: int

    @property
    def nbytes(self) -> int:
        """Returns its size in bytes."""
        return self.num_elements * self.element_size


def _layer_input(facts: ActivationFacts) -> Iterator[SavedTensor]:
    """Saves the input of the first layer of each recomputed segment, and nothing of the others."""
    yield SavedTensor("layer input", facts.num_residual_tokens * facts.hidden_size, facts.element_size)


def _attn_norm(_: ActivationFacts) -> Iterator[SavedTensor]:
    """Saves nothing: the norm is part of the linear layer (core gpt_layer_specs.py: a LayerNormLinear `linear_qkv`)."""
    yield from ()


def _qkv_linear(facts: ActivationFacts) -> Iterator[SavedTensor]:
    """Saves the layer's input, the norm's output and its statistic (TE layernorm_linear.py 526; RMSNorm has no mean).

    With sequence parallelism both are this rank's shard; the norm's output is gathered again in the backward pass
    (`ln_out_needs_gather`). The projection's own output is not saved here. Norms of queries and keys run inside the
    module (core attention.py, `get_query_key_value_tensors`) and save a contiguous copy of their input (TE
    ops/basic/rmsnorm.py 187, 209).
    """
    residual = facts.num_residual_tokens * facts.hidden_size
    yield SavedTensor("layer input", residual, facts.element_size)
    yield SavedTensor("attention norm's output", residual, facts.element_size)
    yield SavedTensor("attention norm's statistic", facts.num_residual_tokens, _FP32_BYTES)
    if facts.qk_norm:
        for name, heads in (("queries", facts.num_heads), ("keys", facts.num_query_groups)):
            yield SavedTensor(f"{name} before their norm", _heads(facts, heads), facts.element_size)
            yield SavedTensor(f"statistic of {name}' norm", facts.num_tokens * heads, _FP32_BYTES)


QUERIES_KEYS_VALUES = ("queries", "keys", "values")
"""What `core_attn` saves that is recomputed where it is offloaded beside `layer_input`."""


def _core_attn(facts: ActivationFacts) -> Iterator[SavedTensor]:
    """Saves queries, keys, values, output, and the softmax's log-sum (TE backends.py 1812 to 1853; so does flash-attn).

    Each is a storage of its own: rotary embeddings allocate new queries and keys, and values, a view of the
    projection's output, are made contiguous since their strides are not those of the keys (TE utils.py
    `get_qkv_layout`).
    """
    heads = (facts.num_heads, facts.num_query_groups, facts.num_query_groups)
    for name, num_heads in zip(QUERIES_KEYS_VALUES, heads, strict=True):
        yield SavedTensor(name, _heads(facts, num_heads), facts.element_size)
    yield _attention_output(facts)
    yield SavedTensor("softmax's log-sum", facts.num_tokens * facts.num_heads, _FP32_BYTES)


def _attn_proj(facts: ActivationFacts) -> Iterator[SavedTensor]:
    """Saves its input, which is the attention's output (TE linear.py 717, `saved_inputmat`)."""
    yield _attention_output(facts)


def _mlp_norm(facts: ActivationFacts) -> Iterator[SavedTensor]:
    """Saves the norm's input and statistic before experts (TE ops/basic/rmsnorm.py 209).

    Saves nothing before a dense MLP, into whose linear layer the norm is fused.
    """
    if facts.is_moe:
        residual = facts.num_residual_tokens * facts.hidden_size
        yield SavedTensor("MLP norm's input", residual, facts.element_size)
        yield SavedTensor("MLP norm's statistic", facts.num_residual_tokens, _FP32_BYTES)


def _expert_fc1(facts: ActivationFacts) -> Iterator[SavedTensor]:
    """Saves the tokens sorted by expert: each expert's are a view of one storage (TE grouped_linear.py 826, 935).

    The smallest offloaded size is compared with the whole storage here, but with each view in megatron-core.
    """
    if facts.is_moe:
        yield SavedTensor("experts' tokens", facts.num_expert_tokens * facts.hidden_size, facts.element_size)


def _moe_act(facts: ActivationFacts) -> Iterator[SavedTensor]:
    """Saves the activation's input (gate and up projection) and the routing weights (core moe/experts.py 805 on).

    The second linear layer saves the activation's output, outside of this module. The fused kernel saves no more than
    that (core fusions/fused_bias_swiglu.py, `WeightedSwiGLUFunction`). Unfused, autograd also saves the activated gate,
    the up projection (a copy, since an offset was added), and their product.
    """
    if facts.is_moe:
        ffn = facts.num_expert_tokens * facts.expert_ffn_size
        yield SavedTensor("activation's input", 2 * ffn, facts.element_size)
        yield SavedTensor("routing weights", facts.num_expert_tokens, _FP32_BYTES)
        if not facts.fused_swiglu:
            for name in ("activated gate", "up projection", "activation's product"):
                yield SavedTensor(name, ffn, facts.element_size)


def _fused_group_mlp(facts: ActivationFacts) -> Iterator[SavedTensor]:
    """Saves the inputs of linear layers and activation (TE ops/basic/grouped_linear.py 1160, swiglu.py 552)."""
    if facts.is_moe:
        ffn = facts.num_expert_tokens * facts.expert_ffn_size
        yield SavedTensor("experts' tokens", facts.num_expert_tokens * facts.hidden_size, facts.element_size)
        yield SavedTensor("activation's input", 2 * ffn, facts.element_size)
        yield SavedTensor("routing weights", facts.num_expert_tokens, _FP32_BYTES)
        yield SavedTensor("second linear layer's input", ffn, facts.element_size)


def _heads(facts: ActivationFacts, num_heads: int) -> int:
    return facts.num_tokens * num_heads * facts.head_dim


def _attention_output(facts: ActivationFacts) -> SavedTensor:
    return SavedTensor("attention's output", _heads(facts, facts.num_heads), facts.element_size)


# The function of each module that lists its saved tensors per layer and micro-batch, in forward order.
SAVED_BY: Mapping[str, Callable[[ActivationFacts], Iterator[SavedTensor]]] = {
    "layer_input": _layer_input,
    "attn_norm": _attn_norm,
    "qkv_linear": _qkv_linear,
    "core_attn": _core_attn,
    "attn_proj": _attn_proj,
    "mlp_norm": _mlp_norm,
    "expert_fc1": _expert_fc1,
    "moe_act": _moe_act,
    "fused_group_mlp": _fused_group_mlp,
}
