"""Trains a case of long_rows.py, measures its steps, and times their kernels alone: attention and matrix products."""

import statistics
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from typing import Any

import torch
from gpu_watch import GpuWatch
from long_rows import WAYS, Case, Way
from measuring import peak_gib, planned_gib, random_rows, timed_call
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_layer import TransformerLayer
from one_rank import one_rank_worker
from result_file import TableValue

from nemo_offload_rl.algorithms.losses import ClippedPGLoss, NLLLoss
from nemo_offload_rl.config.megatron import tokens_of_tile
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.streams import Waits
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.phases import bf16_peak_tflops
from nemo_offload_rl.placement.host import host_facts
from nemo_offload_rl.plan.step_time import TRAINING_PASSES, read_flop_model
from nemo_offload_rl.run.setup import fields_from
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

Row = dict[str, TableValue]
_NUM_DIGITS = 3


def measure(case: Case, config: Any, num_steps: int) -> Row:
    """Trains in this process.

    Args:
        case: what is trained.
        config: its recipe, for this machine.
        num_steps: of training; of several, the first is a warm-up.

    Raises:
        torch.OutOfMemoryError: it does not fit on the GPU.
        HostBudgetError: it does not fit in the host's memory.
    """
    policy = config["policy"]
    planned = planned_gib(case.algorithm, config, host_facts())
    loss = ClippedPGLoss(**fields_from(ClippedPGLoss, config["loss_fn"])) if case.algorithm == "grpo" else NLLLoss()
    has_gpu = torch.cuda.is_available()
    before = _driver_gib() if has_gpu else 0.0
    grown: dict[str, float] = {}
    with ExitStack() as stack:
        with GpuWatch() as watch:
            needs_reference = isinstance(loss, ClippedPGLoss) and loss.needs_reference_logprobs
            worker = one_rank_worker(policy, init_reference_model=needs_reference)
            stack.callback(worker.shutdown)
            data = random_rows(1, case.tokens, policy["hf_config"]["vocab_size"])
            with watch.peak("passes", grown):
                passes = _logprob_passes(worker, data, loss)
                steps = _train(worker, data, loss, num_steps)
        row: Row = {"planned_gib": planned, "peak_gib": peak_gib(worker, "train"), "steps": len(steps["step_s"])}
        row["driver_peak_gib"] = before + grown["passes"] if has_gpu else None
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB if has_gpu else None
        row |= {name: statistics.median(values) if values else None for name, values in steps.items()} | passes
        row["host_gib"] = worker.offloader.context.arena.allocated_bytes / GIB
        step_s = statistics.median(steps["step_s"])
        flops = read_flop_model(hf_config(policy).to_dict(), policy)
        peak = bf16_peak_tflops([worker.gpu_name()]) if has_gpu else None
        row["mfu"] = (
            None if peak is None else TRAINING_PASSES * flops.forward_flops([case.tokens]) / step_s / peak / 1e12
        )
        # For a run that is stopped meanwhile.
        print(f"{case} before its kernels are timed: {_rounded(row)}", flush=True)
        row["kernels_s"] = kernel_seconds(worker, policy, case.tokens, WAYS[case.way])
        return _rounded(row)


def _rounded(row: Row) -> Row:
    return {name: round(value, _NUM_DIGITS) if isinstance(value, float) else value for name, value in row.items()}


def _train(worker: MegatronPolicyWorker, data: BatchedData, loss: Any, num_steps: int) -> dict[str, list[float]]:
    """Returns the seconds of steps, and of these the ones in which the GPU waited for copies."""
    timed: Any = lambda: nullcontext(Waits())  # noqa: E731
    if (offloader := worker.activations.offloader) is not None:
        # The worker times its second step itself, and there is one clock.
        copies: Any = offloader.copies
        timed, copies.timed_waits = copies.timed_waits, timed
    found: dict[str, list[float]] = {"step_s": [], "exposed_s": [], "optimizer_exposed_s": []}
    worker.prepare_for_training()
    for number in range(num_steps):
        worker.residency_metrics()
        with timed() as waits:
            seconds, _ = timed_call(lambda: worker.train(data, loss, gbs=1, mbs=1))
        moves = worker.residency_metrics()
        if number or num_steps == 1:
            found["step_s"].append(seconds)
            found["optimizer_exposed_s"].append(moves["train/optimizer_state/exposed_s"])
            if offloader is not None:
                found["exposed_s"].append(waits.seconds_waited)
    return found


def _logprob_passes(worker: MegatronPolicyWorker, data: BatchedData, loss: Any) -> Row:
    """Adds to a batch of GRPO what its log-prob passes return; returns their columns, without values in SFT."""
    row: Row = dict.fromkeys(("logprob_s", "reference_s", "logprob_peak_gib"))
    if not isinstance(loss, ClippedPGLoss):
        return row
    row["logprob_s"], previous = timed_call(lambda: worker.get_logprobs(data, mbs=1))
    data["prev_logprobs"] = data["generation_logprobs"] = previous["logprobs"]
    row["logprob_peak_gib"] = peak_gib(worker, "logprobs")
    if loss.needs_reference_logprobs:
        row["reference_s"], reference = timed_call(lambda: worker.get_reference_policy_logprobs(data, mbs=1))
        data["reference_policy_logprobs"] = reference["reference_logprobs"]
    data["advantages"] = torch.ones(data["input_ids"].shape)
    return row


def _driver_gib() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def kernel_seconds(worker: MegatronPolicyWorker, policy: Any, tokens: int, way: Way) -> float | None:
    """Returns the seconds that a step's attention and matrix products take by themselves; None without a GPU.

    Left out: norms, activations, rotary embeddings, the loss, the optimizer, and all copies.
    """
    if worker.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    cfg = policy["megatron_cfg"]
    layers = [module for module in worker.state.model[0].modules() if isinstance(module, TransformerLayer)]
    attention, mlp = layers[0].self_attention, layers[0].mlp
    forward_s, backward_s = _attention_seconds(attention, tokens)
    of_layer = way.attention_passes * forward_s + backward_s
    tile = tokens_of_tile(cfg["mlp_tile_tokens"], worker.state.config.hidden_size) or tokens
    linear = [(module, tokens) for module in (attention.linear_qkv, attention.linear_proj)]
    for module, rows in (*linear, *((module, min(tile, tokens)) for module in (mlp.linear_fc1, mlp.linear_fc2))):
        forward_s, backward_s = _product_seconds(module.weight.shape, rows)
        of_layer += tokens / rows * (way.layer_passes * forward_s + backward_s)
    rows = min(cfg["fused_linear_logprobs_chunk_size"], tokens)
    forward_s, backward_s = _product_seconds((worker.state.vocab_size, worker.state.config.hidden_size), rows)
    return len(layers) * of_layer + tokens / rows * (2 * forward_s + backward_s)


def _attention_seconds(attention: Any, tokens: int) -> tuple[float, float]:
    config = attention.config
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    query, key, value = (_random(tokens, 1, number, size).requires_grad_() for number in (heads, groups, groups))
    gradient = _random(tokens, 1, heads * size)
    made: list[torch.Tensor] = []

    def forward() -> None:
        made.clear()
        made.append(attention.core_attention(query, key, value, None, attn_mask_type=AttnMaskType.causal))

    def backward() -> None:
        torch.autograd.grad(made.pop(), (query, key, value), gradient)

    forward_s, backward_s = _seconds(forward, backward)
    return forward_s, backward_s


def _product_seconds(shape: Any, rows: int) -> tuple[float, float]:
    """Returns the seconds of x W^T, and of both of its gradients.

    Args:
        shape: of W, [output, input].
        rows: of x.
    """
    weight, x, gradient = _random(*shape), _random(rows, shape[1]), _random(rows, shape[0])

    def backward() -> None:
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    forward_s, backward_s = _seconds(lambda: torch.mm(x, weight.t()), backward)
    return forward_s, backward_s


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _seconds(*parts: Callable[[], object], budget_s: float = 2.0) -> list[float]:
    """Returns the median seconds of each of the parts, which run in turn.

    The first round is left out, unless it takes the whole budget: steps have run the same kernels before.
    """
    taken: list[list[float]] = []
    while not taken or (len(taken) < 20 and sum(map(sum, taken)) < budget_s):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        marks[0].record()
        for part, mark in zip(parts, marks[1:], strict=True):
            part()
            mark.record()
        marks[-1].synchronize()
        taken.append([before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)])
    return [statistics.median(of_part) for of_part in zip(*(taken[1:] or taken), strict=True)]
