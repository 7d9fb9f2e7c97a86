"""Makes the layer spec without Transformer Engine: megatron-core's local modules, torch's attention, our RMSNorm."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from nemo_offload_rl.mcore.context_parallel import gathered, positions_of_ranks
from nemo_offload_rl.mcore.patches import rotary


class SdpaCoreAttention(MegatronModule):
    """Computes causal attention by `torch.nn.functional.scaled_dot_product_attention`, of padded and of packed rows.

    megatron-core's own local module materialises the [B, heads, S, S] scores, needs a boolean mask made on the GPU, and
    does not know packed rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        group = parallel_state.get_context_parallel_group(check_initialized=False)
        self._cp_group = group if group is not None and group.size() > 1 else None
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if windowed and config.window_size is not None else None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """Attend causally; in a layer with a sliding window to the token itself and the `window` tokens before it.

        Args:
            query: [S, B, heads, D]; [T, heads, D] of a packed row.
            key: [S, B, query groups, D]; [T, query groups, D].
            value: [S, B, query groups, D]; [T, query groups, D].
            attention_mask: must be None: the mask is causal, and right padding needs no other.
            attn_mask_type: must be causal or None.
            attention_bias: must be None.
            packed_seq_params: where the sequences of a packed row start; each attends to itself alone.

        Returns:
            [S, B, heads * D]; [T, 1, heads * D].
        """
        assert attention_mask is None and attention_bias is None
        assert attn_mask_type in (None, AttnMaskType.causal)
        if self._cp_group is not None:
            return self._attend_over_ranks(query, key, value, packed_seq_params)
        cu_seqlens = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        return self._attend_whole(query, key, value, cu_seqlens)

    def _attend_over_ranks(self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: Any) -> Tensor:
        """Returns the attention of this rank's tokens, computed from the whole row; each rank computes all of it."""
        assert self._cp_group is not None
        size = self._cp_group.size()
        if packed_seq_params is None:
            starts, cu_seqlens = torch.tensor([0, len(query) * size], device=query.device), None
        else:
            starts = cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        positions = positions_of_ranks(starts, size)
        q, k, v = (gathered(t, positions, self._cp_group, dim=0, sums_gradients=True) for t in (query, key, value))
        return self._attend_whole(q, k, v, cu_seqlens).index_select(0, positions[self._cp_group.rank()])

    def _attend_whole(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        if cu_seqlens is None:
            return self._attend(query, key, value)
        parts, places = [], []
        for index, is_real in _groups_of_similar_length(cu_seqlens):
            parts.append(self._attend(query[index], key[index], value[index])[is_real])
            places.append(index[is_real])
        return torch.cat(parts)[torch.cat(places).argsort()][:, None]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the attention [S, B, heads * D] of rows of one sequence each."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        mask = None
        if self.window is not None and self.window + 1 < len(query):
            assert len(query) == len(key)
            mask = query.new_ones(len(query), len(query), dtype=torch.bool).tril().triu(-self.window)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def _groups_of_similar_length(cu_seqlens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the sequences of a packed row in padded batches of less than twice their tokens.

    A call for each sequence would take seven times as long where sequences are short, and one batch of all too much
    memory where one of them is long.

    Args:
        cu_seqlens: int32 [n + 1].

    Yields:
        The positions in the row of a batch's tokens, int64 [S, B]; and which of them are not padding, bool [S, B].
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff()
    sizes = [(length - 1).bit_length() for length in lengths.tolist()]
    for size in sorted(set(sizes)):
        group = torch.tensor([n for n, other in enumerate(sizes) if other == size], device=cu_seqlens.device)
        columns = torch.arange(int(lengths[group].max()), device=cu_seqlens.device)[:, None]
        is_real = columns < lengths[group]
        yield torch.where(is_real, starts[group] + columns, 0), is_real


class RMSNorm(torch.nn.RMSNorm):
    """Wraps torch's RMSNorm, which megatron-core's own wrapper refuses under sequence parallelism.

    Its weight is marked so that `finalize_model_grads` adds up the gradients of the sequence shards.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = config.layernorm_zero_centered_gamma
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)
        # Not `self.weight.sequence_parallel = ...`: Parameter declares no such attribute.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dimension; a zero-centered weight (Gemma's) is stored minus 1."""
        if not self.zero_centered:
            return super().forward(x)
        return F.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


def local_block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Returns the spec of this stage's layers without Transformer Engine, for a Megatron-Bridge model provider.

    Args:
        config: a `GPTModelProvider`.
        vp_stage: index of the virtual pipeline stage.
    """
    rotary.install()
    with_experts, dense = _layer_spec(config, config.num_moe_experts), _layer_spec(config, None)
    has_experts = _expert_layers(config)
    layers = [with_experts if has_experts[layer] else dense for layer in _layers_of_stage(config, vp_stage)]
    norm = RMSNorm if config.normalization == "RMSNorm" else WrappedTorchNorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layers_of_stage(config: Any, vp_stage: int | None) -> Sequence[int]:
    """Returns the indices in the model of this stage's layers, as `get_gpt_decoder_block_spec` computes them."""
    if config.pipeline_model_parallel_layout is not None:
        layout = config.pipeline_model_parallel_layout
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))


def _expert_layers(config: Any) -> list[bool]:
    """Returns for each layer whether it has experts, as `get_gpt_decoder_layer_specs` reads `moe_layer_freq`."""
    freq = config.moe_layer_freq
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    return [bool(freq[i]) if isinstance(freq, list) else i % freq == 0 for i in range(config.num_layers)]


def _layer_spec(config: Any, num_experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer = spec.submodules
    attention = layer.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    if config.normalization == "RMSNorm":
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
