"""Computes next-token log-probs from hidden states, without ever holding the logits of all tokens.

The forward pass computes the logits of some tokens at a time. The backward pass computes them again, for all tokens and
part of the vocabulary at a time: each part of the weight's gradient is then a single matrix product, with nothing of
the weight's size to accumulate, and tensor-parallel ranks sum up the hidden states' gradient once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from nemo_offload_rl.mcore.logprob import logprob_kernels
from nemo_offload_rl.mcore.logprob.logprob import SamplingFilter, filtered, scale, slices
from nemo_offload_rl.memory.units import round_up

# A part of the vocabulary has a multiple of this many columns, which suits the GPU's matrix product.
_COLUMNS = 64


@dataclass(frozen=True)
class LinearLogprobs:
    """Computes log-probs of target tokens from the input of the output layer.

    Attributes:
        vocab_size: number of real tokens; rows of the weight beyond are padding.
        temperature: the logits are divided by it.
        kept: for each column of the result, the tokens that the softmax is taken over.
        chunk_tokens: as many logits as this many tokens have are in memory at a time.
        tp_group: the tensor-parallel group; None or a group of one for the whole vocabulary.
        sequence_parallel: whether each rank of the group has a part of the tokens' hidden states.
    """

    vocab_size: int
    temperature: float
    kept: tuple[SamplingFilter, ...]
    chunk_tokens: int
    tp_group: ProcessGroup | None
    sequence_parallel: bool

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return log-probs of target tokens.

        Args:
            hidden: [S, B, H]; with sequence parallelism this rank's [S / ranks, B, H].
            weight: [V_local, H], this rank's rows of the output layer's weight.
            targets: int64 [S, B], token ids below `vocab_size`.

        Returns:
            float32 [S, B, len(kept)], with grad.
        """
        values: Tensor = _LinearLogprobs.apply(hidden, weight, targets.reshape(-1), self)
        return values.reshape(*targets.shape, len(self.kept))

    @property
    def is_split(self) -> bool:
        """Returns whether other ranks have parts of the vocabulary."""
        return self.tp_group is not None and self.tp_group.size() > 1

    def first_of(self, weight: Tensor) -> int:
        """Returns the token id of the first row of this rank's weight."""
        return 0 if self.tp_group is None else self.tp_group.rank() * weight.shape[0]

    def all_tokens(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states [T, H] of all tokens; gathers them with sequence parallelism."""
        if self.sequence_parallel and self.is_split:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return hidden.reshape(-1, hidden.shape[-1])

    def summed_over_ranks(self, grad: Tensor, hidden: Tensor) -> Tensor:
        """Returns the gradient of `hidden`, summed over ranks from this rank's part of it, [T, H] for all tokens."""
        grad = grad.to(hidden.dtype).view(-1, *hidden.shape[1:])
        if not self.is_split:
            return grad
        if self.sequence_parallel:
            scattered: Tensor = reduce_scatter_to_sequence_parallel_region(grad, group=self.tp_group)
            return scattered
        torch.distributed.all_reduce(grad, group=self.tp_group)
        return grad


class _LinearLogprobs(torch.autograd.Function):
    """Computes log softmax(hidden @ weight.T / temperature)[target], float32 [T, filters].

    For the backward pass it saves its inputs and, for each filter, one or two float32 per token.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, of: LinearLogprobs) -> Tensor:
        tokens = of.all_tokens(hidden)
        first = of.first_of(weight)
        local = targets - first
        mine = (local >= 0) & (local < weight.shape[0])
        local = torch.where(mine, local, 0)
        maximum = torch.empty(len(tokens), dtype=torch.float32, device=hidden.device)
        chosen = torch.empty_like(maximum)
        total = maximum.new_empty(len(tokens), len(of.kept))
        # The smallest logit that a filter keeps and the largest that it drops; unused by filters that keep all.
        least, below = torch.full_like(total, -torch.inf), torch.full_like(total, -torch.inf)
        has_kernels = _has_kernels(hidden, of)
        for rows in slices(len(tokens), of.chunk_tokens):
            logits = tokens[rows] @ weight.t()
            if has_kernels:
                logprob_kernels.row_statistics(
                    logits,
                    local[rows],
                    of.vocab_size - first,
                    of.temperature,
                    maximum=maximum[rows],
                    total=total[rows, 0],
                    chosen=chosen[rows],
                )
                continue
            scaled = scale(logits, of.vocab_size - first, of.temperature)
            chosen[rows] = scaled.gather(1, local[rows, None]).squeeze(1)
            # All of a rank's part of the vocabulary may be padding, whose logits are -inf.
            maximum[rows] = scaled.amax(dim=1).clamp_(min=torch.finfo(torch.float32).min)
            for column, kept in enumerate(of.kept):
                some = scaled
                if not kept.keeps_all:
                    least[rows, column] = kept.thresholds(scaled, of.tp_group)
                    some = filtered(scaled, least[rows, column], local[rows], mine[rows])
                    is_below = scaled < least[rows, column, None]
                    below[rows, column] = torch.where(is_below, scaled, -torch.inf).amax(dim=1)
                total[rows, column] = _shares(some, maximum[rows], is_last=column == len(of.kept) - 1).sum(dim=1)
        if of.is_split:
            own = maximum.clone()
            both = torch.cat([maximum[:, None], below], dim=1)
            torch.distributed.all_reduce(both, ReduceOp.MAX, group=of.tp_group)
            maximum, below = both[:, 0], both[:, 1:]
            parts = torch.cat([total * (own - maximum).exp_()[:, None], torch.where(mine, chosen, 0.0)[:, None]], dim=1)
            torch.distributed.all_reduce(parts, group=of.tp_group)
            total, chosen = parts[:, :-1], parts[:, -1]
        # Threshold half-way between both: logits that are computed again, by other products, differ in their last bits.
        ctx.save_for_backward(hidden, weight, local, mine, maximum[:, None] + total.log(), (least + below) / 2)
        ctx.of = of
        return (chosen - maximum)[:, None] - total.log()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        hidden, weight, local, mine, log_total, least = ctx.saved_tensors
        of: LinearLogprobs = ctx.of
        tokens = of.all_tokens(hidden)
        limit = of.vocab_size - of.first_of(weight)
        factor = grad / of.temperature
        has_kernels = _has_kernels(hidden, of)
        grad_tokens = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        width = round_up(max(1, weight.shape[0] * of.chunk_tokens // len(tokens)), _COLUMNS)
        for columns in slices(weight.shape[0], width):
            part = weight[columns]
            logits = tokens @ part.t()
            inside = mine & (local >= columns.start) & (local < columns.start + len(part))
            own = torch.where(inside, local - columns.start, -1)
            if has_kernels:
                logprob_kernels.turn_into_gradient(
                    logits, own, log_total[:, 0], factor[:, 0], limit - columns.start, of.temperature
                )
                grad_part = logits
            else:
                scaled = scale(logits, limit - columns.start, of.temperature)
                grad_part = _gradient(of, scaled, own, factor, log_total, least).to(weight.dtype)
            grad_tokens += grad_part @ part
            if grad_weight is not None:
                torch.mm(grad_part.t(), tokens, out=grad_weight[columns])
        return of.summed_over_ranks(grad_tokens, hidden), grad_weight, None, None


def _has_kernels(hidden: Tensor, of: LinearLogprobs) -> bool:
    """Returns whether Triton kernels can read the logits; they support no filter."""
    return hidden.is_cuda and len(of.kept) == 1 and of.kept[0].keeps_all


def _gradient(
    of: LinearLogprobs, scaled: Tensor, own: Tensor, factor: Tensor, log_total: Tensor, least: Tensor
) -> Tensor:
    """Returns the sum over filters of (onehot - softmax) * factor, float32; overwrites the logits."""
    inside, column_of_own = own >= 0, own.clamp(min=0)
    out = None
    for column, kept in enumerate(of.kept):
        some = scaled if kept.keeps_all else filtered(scaled, least[:, column], column_of_own, inside)
        share = _shares(some, log_total[:, column], is_last=column == len(of.kept) - 1)
        share.mul_(-factor[:, column, None])
        out = share if out is None else out.add_(share)
    assert out is not None
    return out.scatter_add_(1, column_of_own[:, None], torch.where(inside, factor.sum(dim=1), 0.0)[:, None])


def _shares(logits: Tensor, subtracted: Tensor, *, is_last: bool) -> Tensor:
    """Returns exp(logits - subtracted[:, None]); overwrites the logits if they are not read again (`is_last`)."""
    return (logits.sub_(subtracted[:, None]) if is_last else logits - subtracted[:, None]).exp_()
