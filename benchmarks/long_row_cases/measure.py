"""Trains one case, and measures its steps."""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from gpu_watch import GpuWatch
from one_rank import one_rank_worker
from result_file import TableValue

from long_row_cases.kernels import kernel_seconds
from long_row_cases.ways import WAYS, Case
from nemo_offload_rl.algorithms.losses import ClippedPGLoss, NLLLoss
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.streams import Waits
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.phases import bf16_peak_tflops
from nemo_offload_rl.placement.machine import host_facts
from nemo_offload_rl.plan.host_budget import HostMemory
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.row_tokens import training_bytes
from nemo_offload_rl.plan.step_time import TRAINING_PASSES
from nemo_offload_rl.residency.table import Phase
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
            data = _batch(case, policy["hf_config"]["vocab_size"])
            with watch.peak("passes", grown):
                passes = _logprob_passes(worker, data, loss)
                steps = _train(worker, data, loss, num_steps)
        row: Row = {"planned_gib": planned, "peak_gib": peak_gib(worker, "train"), "steps": len(steps["step_s"])}
        row["driver_peak_gib"] = before + grown["passes"] if has_gpu else None
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB if has_gpu else None
        row |= {name: statistics.median(values) if values else None for name, values in steps.items()} | passes
        row["host_gib"] = worker.offloader.context.arena.allocated_bytes / GIB
        step_s = statistics.median(steps["step_s"])
        flops, peak = worker.flop_model(), bf16_peak_tflops([worker.gpu_name()]) if has_gpu else None
        assert flops is not None
        row["mfu"] = (
            None if peak is None else TRAINING_PASSES * flops.forward_flops([case.tokens]) / step_s / peak / 1e12
        )
        # For a run that is stopped meanwhile.
        print(f"{case} before its kernels are timed: {_rounded(row)}", flush=True)
        row["kernels_s"] = kernel_seconds(worker, policy, case.tokens, WAYS[case.way])
        return _rounded(row)


def _rounded(row: Row) -> Row:
    return {name: round(value, _NUM_DIGITS) if isinstance(value, float) else value for name, value in row.items()}


def planned_gib(algorithm: str, config: Any, host: HostMemory) -> float:
    """Returns the GPU memory of a training step by the plan: state, activations and logits, without any margin."""
    planner = Planner(hf_config(config["policy"]).to_dict(), algorithm, gpu_bytes=None)
    run = planner.plan(config)
    assert run is not None
    run.check_hosts([host])
    [rank], [training] = run.plan.ranks, training_bytes(config, planner)
    return (sum(rank.gpu_bytes[Phase.TRAIN].values()) + max(training, rank.step_grad_bytes)) / GIB


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


def _batch(case: Case, vocab_size: int) -> BatchedData:
    shape = (1, case.tokens)
    return BatchedData(
        input_ids=torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0)),
        input_lengths=torch.tensor([case.tokens]),
        token_mask=torch.ones(shape),
        sample_mask=torch.ones(1),
    )


def timed_call[Result](function: Callable[[], Result]) -> tuple[float, Result]:
    """Returns the seconds of a call, with the GPU's work, and its result."""
    start = now()
    result = function()
    return now() - start, result


def now() -> float:
    """Returns the clock once the GPU is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib(worker: MegatronPolicyWorker, verb: str) -> float | None:
    """Returns the peak of the last call of a worker method, with the engine's ranges; None without a GPU."""
    return worker.memory_stats().get(f"gpu_peak_{verb}_gib")


def _driver_gib() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB
