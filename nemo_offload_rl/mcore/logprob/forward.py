"""Computes the log-probs of a micro-batch: a model's forward pass, with our own code after its last layer."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from nemo_offload_rl.mcore.batches import MicroBatch, unpack
from nemo_offload_rl.mcore.context_parallel import gathered
from nemo_offload_rl.mcore.logprob.linear_logprob import LinearLogprobs
from nemo_offload_rl.mcore.logprob.logprob import KEEP_ALL, SamplingFilter, next_token_logprobs, token_logprobs
from nemo_offload_rl.mcore.patches import layer_state as patch


@dataclass(frozen=True)
class LogprobOptions:
    """Says which log-probs of tokens are wanted, and how they are computed.

    Attributes:
        vocab_size: number of real tokens.
        temperature: the logits are divided by it.
        kept: filters of the tokens that the softmax is taken over; each filter gives one log-prob per token.
        chunk_tokens: compute as many logits at a time as this many tokens have, and again in the backward pass; None
            computes the logits of a micro-batch at once, and keeps them for the backward pass.
    """

    vocab_size: int
    temperature: float = 1.0
    kept: tuple[SamplingFilter, ...] = (KEEP_ALL,)
    chunk_tokens: int | None = None


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Returns the micro-batch where the model computes; the copies may still be under way."""
    if device.type == "cpu":
        return batch
    move = functools.partial(torch.Tensor.to, device=device, non_blocking=True)
    cu_seqlens = None if batch.cu_seqlens is None else move(batch.cu_seqlens)
    split = None if batch.positions_of_ranks is None else move(batch.positions_of_ranks)
    return dataclasses.replace(
        batch,
        data=batch.data.to(device),
        tokens=move(batch.tokens),
        positions=move(batch.positions),
        cu_seqlens=cu_seqlens,
        positions_of_ranks=split,
    )


def microbatch_logprobs(model: torch.nn.Module, batch: MicroBatch, of: LogprobOptions) -> Tensor:
    """Return log-probs of a micro-batch's tokens, or on earlier pipeline stages the hidden states.

    Args:
        model: a model chunk.
        batch: the micro-batch, on the model's device.
        of: which log-probs to compute.

    Returns:
        float32 [n, S, filters]: entry t is log p(input_ids[t] | input_ids[<t]); entry 0 and padding are 0.
    """
    packed = None if batch.cu_seqlens is None else _packed(batch.cu_seqlens, batch)
    extra: dict[str, Any] = {} if packed is None else {"packed_seq_params": packed}
    if (padding := _padding_for_routers(model, batch)) is not None:
        extra["padding_mask"] = padding
    output: Tensor = model(
        input_ids=_of_this_rank(batch.tokens, batch),
        position_ids=_of_this_rank(batch.positions, batch),
        attention_mask=None,
        output_processor=_process_output,
        output_processor_context=(batch, of),
        **extra,
    )
    return output


def _packed(starts: Tensor, batch: MicroBatch) -> PackedSeqParams:
    """Returns where a packed row's sequences are, with their padding.

    Padding comes after a sequence's tokens, which do not see it, so attention need not know of it. With context
    parallelism both kinds of lengths are those with padding, as in NeMo-RL: so steps were equal to one rank's on GPUs
    (docs/results/context_parallel.md); with the tokens' own lengths beside them packed rows had differed.
    """
    padded = None if batch.positions_of_ranks is None else starts
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def _of_this_rank(row: Tensor, batch: MicroBatch) -> Tensor:
    """Returns the columns of [n, S] that this context-parallel rank computes."""
    if batch.positions_of_ranks is None:
        return row
    return row.index_select(1, batch.positions_of_ranks[mpu.get_context_parallel_rank()])


def _padding_for_routers(model: torch.nn.Module, batch: MicroBatch) -> Tensor | None:
    """Returns the mask of what routers leave out of auxiliary losses and of the counts of tokens per expert.

    None where it changes nothing: in models without experts, and without gradients. Also None for quantile balancing,
    whose router asserts that there is no mask.
    """
    config = get_model_config(model)
    if config.num_moe_experts is None or not torch.is_grad_enabled():
        return None
    if config.moe_router_load_balancing_type == "quantile_balancing":
        return None
    padding = _of_this_rank(batch.padding(), batch)
    if config.sequence_parallel and not get_attr_wrapped_model(model, "pre_process"):
        # GPTModel divides the mask as it divides the embeddings, which only chunks with the embedding do.
        shards = padding.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)
        padding = shards[mpu.get_tensor_model_parallel_rank()]
    return padding


def model_logprobs(model: torch.nn.Module, batch: MicroBatch, *, vocab_size: int, device: torch.device) -> Tensor:
    """Return log-probs [n, S], with grad, of a micro-batch under a whole model on one rank, without a schedule."""
    return microbatch_logprobs(model, to_device(batch, device), LogprobOptions(vocab_size))[..., 0]


def _process_output(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Callable[[Tensor], Tensor],
    context: tuple[MicroBatch, LogprobOptions],
    **_: Any,
) -> Tensor:
    """Replaces what megatron-core does after the last layer, where it copies the logits to put the batch first.

    The logits of 8,192 tokens of a 152k vocabulary are 2.5 GB, copied there and again in the backward pass.
    """
    batch, of = context
    of_targets = _from_logits if of.chunk_tokens is None else _from_hidden_states

    def of_row(targets: Tensor) -> Tensor:
        mine = _of_this_rank(targets.t(), batch).t().contiguous()
        values = of_targets(hidden_states, output_layer, output_weight, scale_logits, of, mine)
        if batch.positions_of_ranks is None:
            return values
        # Every rank computes the loss of whole rows: of its log-probs, it has the whole gradient.
        group = mpu.get_context_parallel_group()
        return gathered(values, batch.positions_of_ranks, group, dim=0, sums_gradients=False)

    values = next_token_logprobs(of_row, batch.tokens)
    return torch.stack([_in_rows(column, batch) for column in values.unbind(dim=-1)], dim=-1)


def _from_logits(
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Callable[[Tensor], Tensor],
    of: LogprobOptions,
    targets: Tensor,
) -> Tensor:
    logits, _bias = output_layer(hidden_states, weight=output_weight)
    logits = scale_logits(logits)
    columns = [
        token_logprobs(
            logits,
            targets,
            vocab_size=of.vocab_size,
            temperature=of.temperature,
            tp_group=mpu.get_tensor_model_parallel_group(),
            kept=kept,
            may_overwrite=len(of.kept) == 1,
        )
        for kept in of.kept
    ]
    return torch.stack(columns, dim=-1)


def _from_hidden_states(
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Callable[[Tensor], Tensor],
    of: LogprobOptions,
    targets: Tensor,
) -> Tensor:
    assert of.chunk_tokens is not None
    weight = output_layer.weight if output_weight is None else output_weight
    compute = LinearLogprobs(
        vocab_size=of.vocab_size,
        temperature=of.temperature / float(scale_logits(torch.ones(1))),  # the factor that it multiplies by
        kept=of.kept,
        chunk_tokens=of.chunk_tokens,
        tp_group=mpu.get_tensor_model_parallel_group(),
        sequence_parallel=output_layer.sequence_parallel,
    )
    return patch.call_with(output_layer, lambda hidden: compute(hidden, weight, targets), hidden_states)


def _in_rows(values: Tensor, batch: MicroBatch) -> Tensor:
    """Returns log-probs [n, S] from [n, S] or, packed, [1, T] of all positions; 0 where no token was predicted."""
    lengths, width = batch.data["input_lengths"], batch.data["input_ids"].shape[1]
    rows = values if batch.cu_seqlens is None else unpack(values[0], batch.cu_seqlens, lengths, width)
    # Entry 0 of a packed sequence was predicted by the last token of its neighbour.
    columns = torch.arange(width, device=rows.device)[None]
    return torch.where((columns > 0) & (columns < lengths[:, None]), rows, 0.0)
