"""Trains a model of cpu_optimizer.py in one of its ways, and measures the steps."""

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cpu_optimizer import STREAMED, Case, Way
from measuring import now, peak_gib, random_rows
from one_rank import one_rank_worker
from result_file import TableValue

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.config import load
from nemo_offload_rl.config.validate import for_machine
from nemo_offload_rl.memory.link import copy_bytes_per_s
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.units import KIB, MIB
from nemo_offload_rl.residency.table import Target
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

RECIPE = Path(__file__).parents[1] / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
# Nothing is refitted or generated: without these, host memory would be reserved for state offloaded in those phases.
_NOTHING_LEAVES = ("policy.offload_optimizer_for_refit=false", "++policy.residency.table.generate.params=gpu")
_NO_REFERENCE = "loss_fn.reference_policy_kl_penalty=0"
WARM_UP = 2  # kernels are compiled, the optimizer's memory is taken
_LINK_BYTES = 256 * MIB


Row = dict[str, TableValue]
Measured = tuple[Row, list[dict[str, Any]]]
"""A row, and what each step has made: loss, gradient norm and a checksum of the parameters, to be compared."""


def measure(case: Case, way: Way, save: Callable[[Measured], None]) -> None:
    """Trains in this process and saves what was measured.

    Args:
        case: what is trained.
        way: to step the optimizer.
        save: gets what was measured, and again with the largest micro-batch where larger ones were tried, so that an
            error in these does not lose the row.

    Raises:
        torch.OutOfMemoryError: the way does not fit on this GPU.
    """
    two_way = two_way_bytes_per_s()
    worker = one_rank_worker(policy_of(case, way, has_gpus=torch.cuda.is_available()))
    try:
        row, made = _measured(worker, case, way, two_way)
        save((row, made))
        if case.larger_mbs and way.name == STREAMED:
            save((row | {"largest_mbs": _largest_mbs(worker, case)}, made))
    finally:
        worker.shutdown()


def two_way_bytes_per_s() -> float | None:
    """Measures the link with copies in both directions at once, as their sum; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    with PinnedArena() as arena:
        segments = [arena.allocate("link measurement", _LINK_BYTES) for _ in range(2)]
        gpu = [torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in segments]
        out, back = (segments[0].tensor, gpu[0]), (gpu[1], segments[1].tensor)
        speed = copy_bytes_per_s(out, back, repeats=5, num_copies=8)
        del out, back
        for segment in segments:
            arena.release(segment)
    return speed


def _measured(worker: MegatronPolicyWorker, case: Case, way: Way, two_way: float | None) -> Measured:
    steps: list[float] = []
    exposed: list[float] = []
    copies: list[tuple[float, float]] = []
    made: list[dict[str, Any]] = []
    for number in range(WARM_UP + case.steps):
        data = random_rows(case.rows, case.seq_length, case.hf_config["vocab_size"], number)
        worker.prepare_for_training()
        worker.residency_metrics()
        with _timed_optimizer(worker) as optimizer:
            start = now()
            report = worker.train(data, NLLLoss(), case.rows, case.mbs)
            seconds = now() - start
        moved = worker.residency_metrics()
        made.append({"loss": report["loss"], "grad_norm": report["grad_norm"], "checksum": _checksum(worker)})
        if number >= WARM_UP:
            steps.append(seconds)
            exposed.append(optimizer[0])
            if "train/optimizer_state/copy_s" in moved:  # streamed
                copies.append((moved["train/optimizer_state/copy_s"], moved["train/optimizer_state/gb"]))
    row: Row = {"case": case.name, "way": way.name, "fraction": way.fraction, "overlap": way.overlap}
    copy_s = [seconds for seconds, _ in copies]
    step_s, exposed_s = statistics.median(steps), statistics.median(exposed)
    streamed = bool(copy_s)
    row |= {
        "step_ms": round(step_s * 1e3, 1),
        "optimizer_ms": round((statistics.median(copy_s) if streamed else exposed_s) * 1e3, 1),
        "exposed_ms": round(exposed_s * 1e3, 1),
        "peak_gpu_mib": _peak_mib(worker, "train"),
        "window_mib": worker.offloader.nbytes()[Target.OPTIMIZER_STATE] // MIB if streamed else 0,
        "host_mib": worker.offloader.context.arena.allocated_bytes // MIB,
        "share_of_link": None,
        "tokens_per_s": round(case.rows * case.seq_length / step_s),
    }
    if streamed and two_way is not None:
        speeds = [gb * 1e9 / seconds for seconds, gb in copies]
        row["share_of_link"] = round(statistics.median(speeds) / two_way, 4)
    row["logprob_ms"] = round(_logprob_s(worker, case) * 1e3, 1)
    row["logprob_peak_gpu_mib"] = _peak_mib(worker, "logprobs")
    row["peak_host_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB // MIB
    row["largest_mbs"] = None
    return row, made


def _logprob_s(worker: MegatronPolicyWorker, case: Case) -> float:
    """Returns the seconds of the second of two passes over a batch; the first one enters the phase."""
    batch = random_rows(case.rows, case.seq_length, case.hf_config["vocab_size"])
    worker.get_logprobs(batch, case.mbs)
    start = now()
    worker.get_logprobs(batch, case.mbs)
    return now() - start


def _largest_mbs(worker: MegatronPolicyWorker, case: Case) -> int:
    """Returns the largest micro-batch in rows; each size is tried in one step of at least as many rows."""
    largest = case.mbs
    for mbs in case.larger_mbs:
        num_rows = max(case.rows, mbs)
        data = random_rows(num_rows, case.seq_length, case.hf_config["vocab_size"])
        try:
            worker.train(data, NLLLoss(), num_rows, mbs)
        except torch.OutOfMemoryError:
            break
        largest = mbs
    return largest


@contextmanager
def _timed_optimizer(worker: MegatronPolicyWorker) -> Iterator[list[float]]:
    """Yields a list that gets the seconds of the optimizer's step on the compute stream."""
    optimizer: Any = worker.state.optimizer
    step, marks = optimizer.step_with_ready_grads, []
    seconds: list[float] = []

    def timed() -> Any:
        marks.append(_mark())
        result = step()
        marks.append(_mark())
        return result

    optimizer.step_with_ready_grads = timed
    yield seconds
    del optimizer.step_with_ready_grads
    begin, end = marks
    if isinstance(begin, float):
        seconds.append(end - begin)
    else:
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)


def _mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _checksum(worker: MegatronPolicyWorker) -> int:
    """Returns a checksum of the bits of every parameter; int64 sums are exact modulo 2**64."""
    sums = [p.detach().view(torch.int16).sum(dtype=torch.int64) for _, p in worker.state.parameters()]
    return int(torch.stack([total * (index + 1) for index, total in enumerate(sums)]).sum())


def _peak_mib(worker: MegatronPolicyWorker, verb: str) -> int | None:
    """Returns the peak of the last call of a worker method, with the engine's ranges; None without a GPU."""
    gib = peak_gib(worker, verb)
    return None if gib is None else round(gib * 1024)


def policy_of(case: Case, way: Way, *, has_gpus: bool) -> dict[str, Any]:
    """Returns the policy section of the recipe, for a machine with GPUs or without."""
    overrides = [
        _NO_REFERENCE,
        f"policy.max_total_sequence_length={case.seq_length}",
        f"policy.train_micro_batch_size={case.mbs}",
        "policy.sequence_packing.enabled=false",
        "policy.megatron_cfg.empty_unused_memory_level=0",
        *case.overrides,
        *_NOTHING_LEAVES,
        *way.overrides,
    ]
    config, _ = for_machine(load(RECIPE, overrides).config, has_gpus=has_gpus)
    policy = {key: value for key, value in config["policy"].items() if key != "generation"}
    return policy | {"hf_config": dict(case.hf_config)}
