"""Runs a training step, and forward-only passes, with megatron-core's own schedules, on the stream it computes on."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nemo_offload_rl.data.batch import BatchedData, GlobalCounts, LossFunction
from nemo_offload_rl.mcore.batches import MicroBatch
from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.logprob.forward import LogprobOptions, microbatch_logprobs, to_device
from nemo_offload_rl.mcore.logprob.logprob import KEEP_ALL
from nemo_offload_rl.mcore.patches.layer_state import clear_saved_state_on_failure, divided_by_trained_tokens
from nemo_offload_rl.memory.errors import preserve_first_error


@contextlib.contextmanager
def router_updates(model: Sequence[torch.nn.Module], config: Any) -> Iterator[Callable[[], None]]:
    """Run a step inside; undo its updates of router biases if it fails or calls the yielded function.

    The schedule itself, in `finalize_model_grads`, updates the biases by the counts of tokens per expert before it is
    known whether the step's gradients are finite; and the next step would add to the counts of a failed schedule.

    Args:
        model: the chunks.
        config: their TransformerConfig.
    """
    has_routers = config.num_moe_experts is not None  # searching for them takes the CPU a millisecond
    modules = (module for chunk in model for module in chunk.modules()) if has_routers else ()
    routers = [module for module in modules if isinstance(module, TopKRouter)]
    biases = [bias for router in routers for bias in (router.expert_bias, router.qb_beta) if bias is not None]
    before = [bias.clone() for bias in biases]

    def undo() -> None:
        for bias, value in zip(biases, before, strict=True):
            bias.copy_(value)
        reset_model_temporary_tensors(config, list(model))  # the counts

    try:
        yield undo
    except BaseException:
        with preserve_first_error():  # a failed GPU raises again
            undo()
        raise


class Skip(Enum):
    """Says why an optimizer step was not taken."""

    NOT_FINITE = "the loss or a gradient is not finite"
    LARGE_NORM = "the gradient's norm is above policy.megatron_cfg.optimizer.grad_norm_skip_threshold"
    NO_TOKENS = "no token of the batch is trained"


@dataclass
class StepResult:
    """Reports the result of one optimizer step, equal on every rank."""

    loss: float
    """NaN if no token of the batch is trained."""
    grad_norm: float
    """Norm of the whole gradient before clipping; NaN if it was not computed, or the loss or a gradient not finite."""
    skipped: Skip | None
    """Why parameters, optimizer state and router biases were left unchanged; None if they were updated."""
    metrics: dict[str, float] = field(default_factory=dict)


def _run(
    state: TrainingState,
    batches: Sequence[MicroBatch],
    on_output: Callable[[MicroBatch, Tensor], Any],
    *,
    of: LogprobOptions,
    forward_only: bool,
    device: torch.device,
) -> list[Any]:
    """Run the schedule; `on_output(batch, logprobs)` gets [n, S, filters] on the last stage for each micro-batch."""

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(iterator)

        def loss_func(logprobs: Tensor, non_loss_data: bool = False) -> Any:
            return on_output(batch, logprobs)

        return microbatch_logprobs(model, batch, of), loss_func

    first = batches[0]
    # Copy all batches before any kernel is queued: a copy from pageable memory waits for the GPU's work.
    on_device = [to_device(batch, device) for batch in batches]
    iterators = [iter(on_device) for _ in state.model]
    schedule = get_forward_backward_func()
    with clear_saved_state_on_failure(state.model):
        return schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=state.model if len(state.model) > 1 else state.model[0],
            num_microbatches=len(batches),
            seq_length=first.tokens.shape[1],
            micro_batch_size=first.tokens.shape[0],
            decoder_seq_length=first.tokens.shape[1],
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def _sum_over_ranks(names_and_values: dict[str, Tensor], device: torch.device) -> dict[str, float]:
    """Sum shares over data-parallel ranks; every pipeline stage learns the last stage's sums."""
    last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    names = sorted(names_and_values)
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        held = [names]
        torch.distributed.broadcast_object_list(
            held, src=mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group()
        )
        names = held[0]
    if last:
        values = torch.stack([names_and_values[name].detach().to(torch.float64) for name in names])
        torch.distributed.all_reduce(values, group=mpu.get_data_parallel_group())
    else:
        values = torch.zeros(len(names), dtype=torch.float64, device=device)
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            values, src=mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group()
        )
    return dict(zip(names, values.tolist(), strict=True))


def global_counts(data: BatchedData, device: torch.device) -> GlobalCounts:
    """Return the valid sequences and tokens of a global batch, summed over data-parallel ranks; collective."""
    local = GlobalCounts.of(data)
    both = torch.stack([local.valid_seqs, local.valid_toks]).to(device)
    torch.distributed.all_reduce(both, group=mpu.get_data_parallel_group())
    return GlobalCounts(valid_seqs=both[0], valid_toks=both[1])


def _add(sums: dict[str, Tensor], shares: dict[str, Tensor]) -> None:
    for name, share in shares.items():
        sums[name] = sums[name] + share if name in sums else share


def _clip_and_update(optimizer: ChainedOptimizer, norm: float) -> None:
    """Run the second half of `ChainedOptimizer.step()`: clip the gradients that `prepare_grads` prepared, and update.

    megatron-core's own skips the update after clipping if the norm is above `grad_norm_skip_threshold`, and counts
    zeros in between; the caller does both. Parameters with a norm of their own (multi-token prediction) and
    Megatron-FSDP are not supported here. tests/unit/mcore/test_worker_step.py compares the source that this follows.
    """
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()


def train_step(
    state: TrainingState,
    batches: Sequence[MicroBatch],
    counts: GlobalCounts,
    loss_fn: LossFunction,
    *,
    of: LogprobOptions,
    device: torch.device,
    empty_unused_memory_level: int = 0,
) -> StepResult:
    """Run forward and backward passes and one optimizer step over one global batch.

    The step is skipped if the loss or a gradient is not finite, if the gradient's norm is above the optimizer's
    `grad_norm_skip_threshold`, or if no token of the global batch is trained, since Adam's momentum and weight decay
    would move the weights without a gradient. The learning-rate schedule does not move: the caller ticks it.

    Args:
        state: model and optimizer.
        batches: this data-parallel rank's micro-batches.
        counts: valid sequences and tokens of the global batch.
        loss_fn: the loss contract's function.
        of: which log-probs the loss gets. If the sampler does not keep all tokens, the loss also gets those over all
            tokens, in the column `unfiltered_logprobs`, with grad.
        device: where the model computes.
        empty_unused_memory_level: from 1 on torch's cache is emptied before the optimizer's step, from 2 on also after
            it (as in megatron/training/training.py).
    """
    assert state.optimizer is not None
    for chunk in state.model:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    # The schedule divides by the number of micro-batches and DDP by the number of data-parallel ranks, but our
    # losses are shares that add up. Context parallelism cancels out: each of its ranks computes the whole loss and goes
    # back through its own tokens, the schedule multiplies by CP (losses that are not per token), DDP divides by both.
    scale = len(batches) * mpu.get_data_parallel_world_size()
    sums: dict[str, Tensor] = {}
    (kept,) = of.kept
    if not kept.keeps_all:
        of = dataclasses.replace(of, kept=(kept, KEEP_ALL))

    def on_output(batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        data = batch.data
        if not kept.keeps_all:
            data = BatchedData({**data, "unfiltered_logprobs": logprobs[..., 1]}).in_groups(data.group_size)
        loss, metrics = loss_fn(logprobs[..., 0], data, counts)
        _add(sums, {"loss": loss.detach().clone(), **metrics})
        return loss * scale, {}

    optimizer = state.optimizer
    assert isinstance(optimizer, ChainedOptimizer)
    with router_updates(state.model, state.config) as undo_router_updates:
        with divided_by_trained_tokens(state.config, counts.valid_toks, scale):
            _run(
                state,
                batches,
                on_output,
                of=of,
                forward_only=False,
                device=device,
            )
        if empty_unused_memory_level >= 1:
            torch.cuda.empty_cache()
        state.before_update()
        # optimizer.step() is split at the gradient norm, its only wait for the GPU: reading the loss adds no other.
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        totals = _sum_over_ranks(sums, device)
        loss = totals.pop("loss")
        if optimizer.config.log_num_zeros_in_grad:
            totals["num_zeros_in_grad"] = float(optimizer.count_zeros())
        has_tokens = bool(counts.valid_toks > 0)
        reason = _reason_to_skip(loss, grad_norm, optimizer.config.grad_norm_skip_threshold, has_tokens=has_tokens)
        if reason is not None:
            undo_router_updates()
            loss = math.nan if reason is Skip.NO_TOKENS else loss  # a sum of nothing would be a perfect 0
            grad_norm = math.nan if reason is Skip.NOT_FINITE else grad_norm
            return StepResult(loss, grad_norm, skipped=reason, metrics=totals)
        state.watch.before_step()
        _clip_and_update(optimizer, grad_norm)
        state.watch.after_step(grad_norm, [group["lr"] for group in optimizer.param_groups], device)
    if empty_unused_memory_level >= 2:
        torch.cuda.empty_cache()
    return StepResult(loss, grad_norm, skipped=None, metrics=totals)


def _reason_to_skip(loss: float, grad_norm: float, threshold: float, *, has_tokens: bool) -> Skip | None:
    if not has_tokens:
        return Skip.NO_TOKENS
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return Skip.NOT_FINITE
    return Skip.LARGE_NORM if grad_norm > threshold else None


@contextlib.contextmanager
def eval_mode(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put model chunks into eval mode for a `with` block."""
    were = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, was in zip(chunks, were, strict=True):
            chunk.train(was)


@torch.no_grad()
def evaluate(
    state: TrainingState,
    batches: Sequence[MicroBatch],
    counts: GlobalCounts,
    loss_fn: LossFunction,
    *,
    of: LogprobOptions,
    device: torch.device,
) -> StepResult:
    """Return the loss and metrics of a batch, forward only."""
    sums: dict[str, Tensor] = {}

    def on_output(batch: MicroBatch, logprobs: Tensor) -> None:
        loss, metrics = loss_fn(logprobs[..., 0], batch.data, counts)
        _add(sums, {"loss": loss, **metrics})

    _run(state, batches, on_output, of=of, forward_only=True, device=device)
    totals = _sum_over_ranks(sums, device)
    return StepResult(totals.pop("loss"), math.nan, skipped=None, metrics=totals)


@torch.no_grad()
def forward_logprobs(
    state: TrainingState,
    batches: Sequence[MicroBatch],
    *,
    of: LogprobOptions,
    device: torch.device,
) -> list[Tensor]:
    """Return log-probs [n, S] float32 of each micro-batch on the CPU, on every pipeline stage."""
    outputs = _run(
        state,
        batches,
        lambda _, logprobs: logprobs[..., 0].contiguous(),
        of=of,
        forward_only=True,
        device=device,
    )
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        if not mpu.is_pipeline_last_stage(ignore_virtual=True):
            outputs = [torch.empty(batch.data["input_ids"].shape, device=device) for batch in batches]
        for output in outputs:
            torch.distributed.broadcast(
                output, src=mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group()
            )
    return [output.cpu() for output in outputs]


class ComputeStream:
    """Moves a thread's work from the default stream to one of its own, if CUDA graphs will be captured.

    A captured backward pass that touches the default stream fails with cudaErrorStreamCaptureInvalidated, and
    autograd's gradient-accumulation nodes run on the stream that they were created on. megatron-core's training has a
    stream for these nodes alone; here everything runs on one stream (docs/decisions/compute-stream.md).

    Args:
        device: the device that this rank computes on; a CPU has no streams.
        captures: whether CUDA graphs will be captured.
    """

    def __init__(self, device: torch.device, *, captures: bool) -> None:
        self._replaced: torch.cuda.Stream | None = None
        if device.type != "cuda" or not captures:
            return
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        if current == default:
            self._replaced = default
            stream = torch.cuda.Stream(device)
            stream.wait_stream(default)
            torch.cuda.set_stream(stream)

    def close(self) -> None:
        """Make the default stream current again if it was replaced; it waits for the work queued so far."""
        if self._replaced is not None:
            self._replaced.wait_stream(torch.cuda.current_stream(self._replaced.device))
            torch.cuda.set_stream(self._replaced)
            self._replaced = None
