"""Splits rows of tokens over the ranks of a context-parallel group, and puts what they compute together again.

A sequence is cut into 2 x CP chunks of one length, of which rank r has number r and number 2 x CP - 1 - r, so that all
ranks have the same part of causal attention's work: as in Transformer Engine (`thd_get_partitioned_indices`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def positions_of_ranks(cu_seqlens: Tensor, size: int) -> Tensor:
    """Returns where in a row the tokens of each rank are.

    Args:
        cu_seqlens: int32 [n + 1], where each sequence starts, with its padding to a multiple of 2 x `size` tokens.
        size: the context-parallel size.

    Returns:
        int64 [size, T / size]: for each rank its positions in the row, sequence by sequence, in their order.
    """
    lengths = cu_seqlens.diff().long()
    total = int(cu_seqlens[-1])
    starts, chunk = (
        values.repeat_interleave(lengths, output_size=total)
        for values in (cu_seqlens[:-1].long(), lengths // (2 * size))
    )
    number = (torch.arange(total, device=cu_seqlens.device) - starts) // chunk.clamp(min=1)
    rank = torch.minimum(number, 2 * size - 1 - number)
    return rank.argsort(stable=True).view(size, total // size)


def gathered(values: Tensor, positions: Tensor, group: ProcessGroup, *, dim: int, sums_gradients: bool) -> Tensor:
    """Returns a whole row of what each rank has for its tokens.

    Args:
        values: of this rank's tokens, [..., T / size, ...].
        positions: from `positions_of_ranks`.
        group: the context-parallel group.
        dim: the dimension of the tokens.
        sums_gradients: True if each rank goes on with a computation of its own, whose gradients add up; False if all
            ranks compute the same from the row, and have the same gradient.
    """
    row: Tensor = _Gathered.apply(values, positions, group, dim, sums_gradients)
    return row


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, positions: Tensor, group: ProcessGroup, dim: int, sums_gradients: bool
    ) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.group, ctx.dim, ctx.sums_gradients = group, dim, sums_gradients
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(group.size())]
        torch.distributed.all_gather(parts, values.contiguous(), group=group)
        return torch.cat(parts, dim=dim).index_select(dim, positions.flatten().argsort())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (positions,) = gradients, ctx.saved_tensors
        if ctx.sums_gradients:
            gradient = gradient.contiguous()
            torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient.index_select(ctx.dim, positions[ctx.group.rank()]), None, None, None, None
