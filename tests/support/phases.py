"""Runs training with or without visits to all phases between the steps; both must give the same numbers."""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer
from support.tiny import random_batch
from torch.distributed.checkpoint import FileSystemReader

from nemo_offload_rl.activation_offload.copies import Span, SpanCopyStream
from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.memory.gpu_range import HostRange
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.streams import CopyStream
from nemo_offload_rl.refit.graphs import _RecordedExport
from nemo_offload_rl.refit.loads import ExportedTensors
from nemo_offload_rl.residency.streamed.window import Window
from nemo_offload_rl.residency.table import Phase, Placement, Target
from nemo_offload_rl.residency.transfer import Mover
from nemo_offload_rl.worker.worker import MegatronPolicyWorker


def checksums(worker: MegatronPolicyWorker) -> list[int]:
    return [int(one) for one in _queued_checksums(worker)]


def _queued_checksums(worker: MegatronPolicyWorker) -> list[torch.Tensor]:
    """Returns the checksums on the device, without waiting for it."""
    return [
        p.detach().contiguous().view(torch.uint8).to(torch.int64).mul(31).add(7).cumsum(-1).sum()
        for _, p in worker.state.parameters()
    ]


def run_steps(
    worker: MegatronPolicyWorker, num_steps: int, *, visit_phases: bool, rows: int = 8
) -> list[dict[str, Any]]:
    """Returns each step's report, with this rank's parameter checksums and log-probs after the step."""
    reports = []
    ranks = worker.parallel_ranks()
    dp_size = ranks["dp_size"]
    for step in range(num_steps):
        seed = step * dp_size + ranks["dp_rank"]
        report = worker.train(random_batch(rows, seed=seed), NLLLoss(), gbs=rows * dp_size, mbs=2)
        sums = _queued_checksums(worker)  # not read before the moves, which must wait for the update and for these
        if visit_phases:
            worker.offload_before_refit()
            worker.offload_after_refit(wait=step % 2 == 0)
            if step % 2:
                worker.start_return(logprobs=True)
        report["logprobs"] = worker.get_logprobs(random_batch(4, seed=seed), mbs=2)["logprobs"].tolist()
        report["checksums"] = [int(one) for one in sums]
        if visit_phases and step % 3 == 2:
            worker.residency.prefetch(Phase.TRAIN)
        reports.append(report)
    return reports


def delay_moves(monkeypatch: Any, seconds: float = 0.01) -> None:
    """Delays every copy back to the GPU, so that a missing wait shows in the numbers."""
    map_chunk, copy_all, copy_spans = HostRange.map, CopyStream.copy_all, SpanCopyStream.copy_all

    def late_map(self: HostRange, index: int) -> None:
        time.sleep(seconds)
        map_chunk(self, index)

    def spin(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * 1.5e9))  # cycles

    def late_copy_all(self: CopyStream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for pair in pairs:
            if self.stream is not None:
                spin(self.stream)
            copy_all(self, [pair])

    def late_spans(self: SpanCopyStream, spans: Iterable[Span]) -> None:
        for span in spans:
            spin(self.stream)
            copy_spans(self, [span])

    monkeypatch.setattr(HostRange, "map", late_map)
    monkeypatch.setattr(CopyStream, "copy_all", late_copy_all)  # makes all copies of training state
    monkeypatch.setattr(SpanCopyStream, "copy_all", late_spans)  # makes all copies of activations


_UPDATE = (ChainedOptimizer, "step_with_ready_grads")
_USES_OF_COMPUTED = [
    *((Mover, name) for name in ("out", "back", "save", "exchange", "put_back", "drop", "take")),
    *((Window, "store"), (SpanCopyStream, "enqueue"), (ExportedTensors, "fill"), (_RecordedExport, "fill")),
]
"""What uses memory that the caller's stream may still compute, or hands it on."""


def delay_compute(monkeypatch: Any, seconds: float = 0.01) -> Counter[str]:
    """Delays the caller's stream, so that a copy or an export that does not wait for it shows in the numbers.

    It sleeps before each move, exchange, store and export of a bucket, which makes all that it computes next late, and
    ten times as long before each update, since the host queues a whole update before the next move.

    Returns:
        The number of sleeps so far before each of these calls; without a GPU they take no time.
    """
    num_sleeps: Counter[str] = Counter()

    def delay(owner: type, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def late(*args: Any, **kwargs: Any) -> Any:
            num_sleeps[f"{owner.__name__}.{name}"] += 1
            if torch.cuda.is_available():
                torch.cuda._sleep(int(seconds * 1.5e9))  # cycles
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, late)

    delay(*_UPDATE, 10 * seconds)
    for owner, name in _USES_OF_COMPUTED:
        delay(owner, name, seconds)
    return num_sleeps


each_delay = pytest.mark.parametrize("delay", [delay_moves, delay_compute], ids=["late copies", "late compute"])


def assert_ends(worker: MegatronPolicyWorker) -> None:
    """Ends a worker, which must leave no page-locked memory."""
    worker.shutdown()
    assert PinnedArena.live_bytes() == 0


def save(worker: MegatronPolicyWorker, folder: Path) -> None:
    """Saves a checkpoint whose padding of shards, uninitialised memory in megatron-core, is filled."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        worker.save_checkpoint(str(folder), save_optimizer=True)
    finally:
        torch.use_deterministic_algorithms(False)


def saved_between_steps(
    worker: MegatronPolicyWorker, folder: Path, *, offload: bool
) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Trains two steps, saves, trains two more; returns the checkpoint's contents and the later steps' reports."""
    run_steps(worker, 2, visit_phases=offload)
    if offload:
        worker.offload_after_refit()
    save(worker, folder)
    if offload:
        assert worker.residency.where(Target.PARAMS) is Placement.HOST
        assert worker.offloader.mapped_bytes == 0  # saving moved nothing to the GPU
    after = run_steps(worker, 2, visit_phases=offload)
    return checkpoint_entries(folder), after


def require_equal_bytes(make: Callable[[], MegatronPolicyWorker], folder: Path) -> None:
    """Requires that workers save the same checkpoint, and go on alike, whether or not their state is offloaded."""
    plain, plain_after = saved_between_steps(make(), folder / "plain", offload=False)
    offloaded, offloaded_after = saved_between_steps(make(), folder / "offloaded", offload=True)
    assert differing(plain, offloaded) == []
    assert offloaded_after == plain_after


def checkpoint_entries(folder: Path) -> dict[str, bytes]:
    places = FileSystemReader(str(folder)).read_metadata().storage_data
    files = {path.name: path.read_bytes() for path in folder.glob("*.distcp")}
    return {str(key): files[at.relative_path][at.offset : at.offset + at.length] for key, at in places.items()}


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """Returns the names and sizes of entries that differ, or that only one of two checkpoints has."""
    return [
        f"{name}: {len(one.get(name, b''))} and {len(other.get(name, b''))} bytes"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]
