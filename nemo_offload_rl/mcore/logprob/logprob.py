"""Computes next-token log-probs from logits that tensor parallelism splits, also of a sampler with top-k and top-p."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from nemo_offload_rl.mcore.model.bridge_import import have_transformer_engine


@dataclass(frozen=True)
class SamplingFilter:
    """Says which tokens a sampler keeps; log-probs are then those of the distribution over them.

    Attributes:
        top_k: Number of tokens to keep; None keeps all. Tokens as likely as the last one of them are kept, too.
        top_p: Keeps the fewest most probable tokens, after top_k, that sum to at least this probability; 1 keeps all.
    """

    top_k: int | None = None
    top_p: float = 1.0

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is filtered."""
        return self.top_k is None and self.top_p == 1

    def thresholds(self, scaled: Tensor, group: ProcessGroup | None) -> Tensor:
        """Returns the smallest logit that is kept in each row.

        Args:
            scaled: float32 [rows, V_local] logits after the temperature, -inf at the vocabulary's padding: this rank's
                slice of the vocabulary.
            group: The ranks that have the other slices; None for the whole vocabulary.

        Returns:
            float32 [rows], equal on all ranks of the group.
        """
        # The top_k of all are among the top_k of each slice; without top_k, top_p looks at every token.
        values = scaled if self.top_k is None else scaled.topk(min(self.top_k, scaled.shape[1])).values
        if group is not None and group.size() > 1:
            slices = [torch.empty_like(values) for _ in range(group.size())]
            torch.distributed.all_gather(slices, values.contiguous(), group=group)
            values = torch.cat(slices, dim=1)
        values = values.sort(dim=1, descending=True).values[:, : self.top_k]
        if self.top_p == 1:
            return values[:, -1]
        probs = values.softmax(dim=1).double()
        mass_before = probs.cumsum(dim=1) - probs
        num_kept = (mass_before < self.top_p).sum(dim=1)  # at least 1: nothing comes before the first
        return values.gather(1, num_kept[:, None] - 1).squeeze(1)


KEEP_ALL = SamplingFilter()


# Tokens whose float32 softmax is alive at one time: 1024 tokens of a 152k vocabulary are 0.6 GB.
CHUNK_TOKENS = 1024


class _VocabParallelLogprob(torch.autograd.Function):
    """Computes log softmax(logits / temperature)[target], the vocabulary split over the ranks of a group.

    As in megatron-core's vocab-parallel cross entropy, three small all-reduces (max, sum of exponentials, target's
    logit) replace a gather of the logits. For the backward pass it saves the logits themselves, in their own dtype,
    and one or two float32 per token; the softmax is computed again in chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        group: ProcessGroup | None,
        first: int,
        limit: int,
        temperature: float,
        kept: SamplingFilter,
    ) -> Tensor:
        """Return log-probs [N] float32 of `target` [N] under `logits` [N, V_local] of any dtype."""
        ranks = group is not None and group.size() > 1
        local = target - first
        mine = (local >= 0) & (local < logits.shape[1])
        local = torch.where(mine, local, 0)
        maximum = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        least = None if kept.keeps_all else torch.empty_like(maximum)
        for rows in slices(logits.shape[0], CHUNK_TOKENS):
            scaled = scale(logits[rows], limit, temperature)
            maximum[rows] = scaled.amax(dim=1)
            if least is not None:
                least[rows] = kept.thresholds(scaled, group)
        if ranks:
            torch.distributed.all_reduce(maximum, ReduceOp.MAX, group=group)
        total, chosen = torch.empty_like(maximum), torch.empty_like(maximum)
        for rows in slices(logits.shape[0], CHUNK_TOKENS):
            scaled = scale(logits[rows], limit, temperature)
            shifted = _kept(scaled, least, local, mine, rows) - maximum[rows, None]
            chosen[rows] = shifted.gather(1, local[rows, None]).squeeze(1)
            total[rows] = shifted.exp_().sum(dim=1)
        chosen = torch.where(mine, chosen, 0.0)
        if ranks:
            both = torch.stack([total, chosen])
            torch.distributed.all_reduce(both, group=group)
            total, chosen = both.unbind()
        ctx.save_for_backward(logits, local, mine, maximum + total.log(), least)
        ctx.limit, ctx.temperature = limit, temperature
        return chosen - total.log()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient (onehot - softmax) / temperature * grad, in the logits' dtype."""
        (grad,) = grad_outputs
        logits, local, mine, log_total, least = ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows in slices(logits.shape[0], CHUNK_TOKENS):
            scaled = scale(logits[rows], ctx.limit, ctx.temperature)
            softmax = (_kept(scaled, least, local, mine, rows) - log_total[rows, None]).exp_()
            factor = (grad[rows] / ctx.temperature)[:, None]
            chunk = softmax.mul_(-factor)
            chunk.scatter_add_(1, local[rows, None], torch.where(mine[rows, None], factor, 0.0))
            out[rows] = chunk.to(out.dtype)
        return out, None, None, None, None, None, None


def slices(length: int, size: int) -> list[slice]:
    """Cut a length into slices of one size; the last may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def scale(logits: Tensor, limit: int, temperature: float) -> Tensor:
    """Return float32 logits / temperature; columns from `limit` on, padding of the vocabulary, get no probability."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    if limit < logits.shape[1]:
        scaled = scaled.clone() if scaled is logits else scaled
        scaled[:, max(limit, 0) :] = -torch.inf
    return scaled


def filtered(scaled: Tensor, least: Tensor, local: Tensor, mine: Tensor) -> Tensor:
    """Return the logits with -inf for tokens that the sampler drops; it kept the target, since it drew it.

    Args:
        scaled: float32 [rows, columns], logits of part of the vocabulary.
        least: float32 [rows], the smallest logit that is kept.
        local: int64 [rows], the target's column.
        mine: bool [rows], whether the target is among the columns.
    """
    is_out = scaled < least[:, None]
    own = mine.nonzero().squeeze(1)
    is_out[own, local[own]] = False
    return scaled.masked_fill(is_out, -torch.inf)


def _kept(scaled: Tensor, least: Tensor | None, local: Tensor, mine: Tensor, rows: slice) -> Tensor:
    return scaled if least is None else filtered(scaled, least[rows], local[rows], mine[rows])


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    tp_group: ProcessGroup | None,
    kept: SamplingFilter = KEEP_ALL,
    may_overwrite: bool = False,
) -> Tensor:
    """Return log-probs of target tokens.

    Args:
        logits: [S, B, V_local], as megatron-core's output layer gives them: this tensor-parallel rank's slice of the
            padded vocabulary.
        targets: int64 [S, B], token ids below `vocab_size`.
        vocab_size: number of real tokens; columns beyond are padding.
        temperature: what the logits are divided by, so that the log-probs are those of the sampled distribution.
        tp_group: the tensor-parallel group; None or a group of one for the whole vocabulary.
        kept: the tokens that the softmax is taken over, after the temperature; a target is always one of them.
        may_overwrite: whether the backward pass may write the gradient over the logits, which nothing else reads then.

    Returns:
        float32 [S, B], with grad if the logits have it.
    """
    width = logits.shape[-1]
    ranks = 1 if tp_group is None else tp_group.size()
    is_plain = temperature == 1.0 and kept.keeps_all and vocab_size == width * ranks
    if logits.is_cuda and have_transformer_engine() and is_plain:
        # One Triton kernel that reads the logits once, where the function above makes some ten float32 passes over
        # them; the logits of 4,096 tokens of a 152k vocabulary are 1.2 GB.
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        group = tp_group if ranks > 1 else None
        return -parallel_cross_entropy(logits, targets, dist_process_group=group, overwrite_input=may_overwrite)
    first = 0 if tp_group is None else width * tp_group.rank()
    flat = logits.reshape(-1, width)
    out = _VocabParallelLogprob.apply(flat, targets.reshape(-1), tp_group, first, vocab_size - first, temperature, kept)
    return out.reshape(targets.shape)


def next_token_logprobs(of_targets: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Return log-probs of a row's own tokens, aligned with them.

    Args:
        of_targets: computes log-probs [S, B, ...] of targets int64 [S, B]; position t predicts token t + 1.
        tokens: int64 [B, S].

    Returns:
        float32 [B, S, ...]: entry t is log p(tokens[t] | tokens[<t]); entry 0 is 0.
    """
    # Every position gets a target, the last one an unused one: cutting it off would copy the logits.
    values = of_targets(tokens.roll(-1, dims=1).t().contiguous()).transpose(0, 1)
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)
