"""Changes rotary embeddings: their frequencies, and how packed rows are rotated without Transformer Engine.

Rotates all sequences of a packed row at once, where Transformer Engine's kernel is not installed. megatron-core then
rotates one sequence after another, and the backward pass copies the gradient of the whole row for each of them: with
512 sequences of 10 tokens a training step took twice as long on a CPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings import (
    rope_utils,
    rotary_pos_embedding,
    yarn_rotary_pos_embedding,
)
from torch import Tensor

from nemo_offload_rl.mcore.context_parallel import positions_of_ranks


def install() -> None:
    """Replaces megatron-core's functions for packed rows, and for rows of context-parallel ranks without a GPU."""
    rope_utils._apply_rotary_pos_emb_thd = _rotate
    if not torch.cuda.is_available():
        rotary_pos_embedding.get_pos_emb_on_this_cp_rank = _of_this_rank
        yarn_rotary_pos_embedding.get_pos_emb_on_this_cp_rank = _of_this_rank


def _rotate(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, cp_group: Any, **options: Any) -> Tensor:
    """Returns this rank's part of a row, [T, heads, D], each sequence rotated from position 0; `freqs` [S, 1, 1, D]."""
    size = cp_group.size()
    total = len(t) * size
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=total)
    positions = torch.arange(total, device=t.device) - starts
    if size > 1:
        positions = positions[positions_of_ranks(cu_seqlens, size)[cp_group.rank()]]
    rotated: Tensor = rope_utils._apply_rotary_pos_emb_bshd(t[:, None], freqs[positions], **options)
    return rotated[:, 0]


def _of_this_rank(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    """Returns the angles of this rank's positions; megatron-core makes their index in page-locked memory."""
    whole = torch.tensor([0, pos_emb.shape[seq_dim]], device=pos_emb.device)
    return pos_emb.index_select(seq_dim, positions_of_ranks(whole, cp_group.size())[cp_group.rank()])


def build_with_frequencies(provider: Any, inverse: Tensor) -> None:
    """Make a Megatron-Bridge provider build models with these inverse frequencies, float32 [head_dim / 2].

    A provider of a subclass could not be sent to other pipeline stages, as exports do.
    """
    provider.provide = functools.partial(_provide, provider.provide, inverse)


def _provide(provide: Callable[..., Any], inverse: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Build a model chunk as `provide` does, with these frequencies."""
    model = provide(*args, **kwargs)
    replace_frequencies(model, inverse)
    return model


def replace_frequencies(model: Any, inverse: Tensor) -> None:
    """Replace the frequencies of a newly built model chunk, of any pipeline stage, which has not used its own yet."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary = model.rotary_pos_emb
    assert type(rotary) is RotaryEmbedding, f"{type(rotary)} is not the class that this patch was written for"
    assert rotary.inv_freq.shape == inverse.shape and rotary.inv_freq.dtype == inverse.dtype
    rotary.inv_freq = inverse.to(rotary.inv_freq.device)
