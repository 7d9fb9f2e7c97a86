"""Defines Triton kernels that read a chunk's logits once, for statistics or to overwrite them with their gradient.

With torch's own operations each takes five or more passes over memory, and a copy of the logits in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_STATISTICS_BLOCK, _GRADIENT_BLOCK = 4096, 2048
_LOWEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).min)


# Triton compiles a kernel's annotations, too: they can only name Triton's own types.
@triton.jit
def _statistics_kernel(
    logits: tl.tensor,
    local: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    chosen: tl.tensor,
    num_columns: tl.tensor,
    limit: tl.tensor,
    temperature: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * num_columns
    # Each lane has a maximum and a sum of its own; they are combined once at the end.
    highest = tl.full([block], _LOWEST, tl.float32)
    sums = tl.zeros([block], tl.float32)
    for first in range(0, limit, block):
        column = first + tl.arange(0, block)
        value = tl.load(start + column, mask=column < limit, other=-float("inf")).to(tl.float32) / temperature
        higher = tl.maximum(highest, value)
        sums = sums * tl.exp(highest - higher) + tl.exp(value - higher)
        highest = higher
    top = tl.max(highest, axis=0)
    tl.store(maximum + row, top)
    tl.store(total + row, tl.sum(sums * tl.exp(highest - top), axis=0))
    target = tl.load(start + tl.load(local + row)).to(tl.float32) / temperature
    tl.store(chosen + row, target)


@triton.jit
def _gradient_kernel(
    logits: tl.tensor,
    own: tl.tensor,
    log_total: tl.tensor,
    factor: tl.tensor,
    num_columns: tl.tensor,
    limit: tl.tensor,
    temperature: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    at = logits + row * num_columns + column
    value = tl.load(at, mask=column < limit, other=-float("inf")).to(tl.float32) / temperature
    share = tl.exp(value - tl.load(log_total + row))
    is_own = (column == tl.load(own + row)).to(tl.float32)
    tl.store(at, (is_own - share) * tl.load(factor + row), mask=column < num_columns)


def row_statistics(
    logits: Tensor, local: Tensor, limit: int, temperature: float, *, maximum: Tensor, total: Tensor, chosen: Tensor
) -> None:
    """Compute each row's maximum, sum of exp(logit - maximum) and target's logit, after the temperature.

    Args:
        logits: [rows, columns], contiguous.
        local: int64 [rows], the targets' columns.
        limit: columns from this one on are padding.
        temperature: what the logits are divided by.
        maximum: float32 [rows], written; very low where all columns are padding.
        total: float32 [rows], written.
        chosen: float32 [rows], written.
    """
    columns = logits.shape[1]
    end = min(max(limit, 0), columns)
    _statistics_kernel[(len(logits),)](
        logits, local, maximum, total, chosen, columns, end, temperature, block=_STATISTICS_BLOCK, num_warps=8
    )


def turn_into_gradient(
    logits: Tensor, own: Tensor, log_total: Tensor, factor: Tensor, limit: int, temperature: float
) -> None:
    """Overwrite logits with (onehot - softmax) * factor.

    Args:
        logits: [rows, columns], contiguous; overwritten, in their own dtype.
        own: int64 [rows], the targets' columns; -1 where the target is not among them.
        log_total: float32 [rows], the logarithm of the sum of all exponentials, after the temperature.
        factor: float32 [rows].
        limit: columns from this one on are padding.
        temperature: what the logits are divided by.
    """
    columns = logits.shape[1]
    end = min(max(limit, 0), columns)
    _gradient_kernel[(len(logits), triton.cdiv(columns, _GRADIENT_BLOCK))](
        logits, own, log_total, factor, columns, end, temperature, block=_GRADIENT_BLOCK, num_warps=8
    )
