"""Trains a combination, and records what has to be equal to its plain run."""

from dataclasses import dataclass
from typing import Any

from activation_cases import batches
from activation_cases.combinations import Combination
from activation_cases.late_copies import late_copies
from activation_cases.worker import Feed, Moved, moved_by, policy, running
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.worker.worker import MegatronPolicyWorker


@dataclass(frozen=True)
class Step:
    """Holds the numbers of a step."""

    loss: float
    grad_norm: float
    checksums: tuple[int, ...]
    """Of this rank's parameters after it."""


@dataclass(frozen=True)
class Trial:
    """Holds the results of a run.

    Attributes:
        steps: what is compared.
        moved: in the last step.
        num_micro_batches: of each step.
        num_replays: CUDA graphs replayed in the last step.
        num_late_copies: copies that were delayed.
    """

    steps: tuple[Step, ...]
    moved: Moved
    num_micro_batches: tuple[int, ...]
    num_replays: int
    num_late_copies: int


def run_trial(
    combination: Combination,
    num_steps: int,
    late_ms: float = 0.0,
    *,
    rank: int = 0,
    world_size: int = 1,
    port: int | None = None,
) -> Trial:
    """Trains a new worker of the combination for some steps.

    Raises:
        RecipeError: validation refuses it.
    """
    section = policy(combination.model, combination.overrides())
    steps, counts = [], []
    with (
        running(section, rank=rank, world_size=world_size, port=port) as worker,
        late_copies(late_ms) as delays,
    ):
        feed = Feed(worker, section, combination.micro_batches, section["train_micro_batch_size"])
        for step in range(num_steps):
            data = feed.batch(step)
            if combination.phases:
                _visit_phases(worker, data, step)
            report = feed.train(data)
            steps.append(Step(report["loss"], report["grad_norm"], _checksums(worker)))
            counts.append(report["num_microbatches"])
        return Trial(tuple(steps), moved_by(worker), tuple(counts), num_replays(worker), delays.num_copies)


def num_replays(worker: MegatronPolicyWorker) -> int:
    """Returns the CUDA graphs replayed in the last training step."""
    return int(worker.graphs.num_replays)


def _visit_phases(worker: MegatronPolicyWorker, data: Any, step: int) -> None:
    """Visits all phases as a GRPO step does, including log-probs before the first training step."""
    worker.offload_before_refit()
    worker.offload_after_refit()
    worker.get_logprobs(data, mbs=batches.FEWEST)
    if step % 3 == 2:
        worker.residency.prefetch(Phase.TRAIN)


def _checksums(worker: MegatronPolicyWorker) -> tuple[int, ...]:
    return tuple(tensor_checksum(parameter) for _, parameter in worker.state.parameters())


def first_difference(run: Trial, plain: Trial) -> str | None:
    """Returns where a run differs from its plain run: the step from 1 on, and what; None if nowhere."""
    for number, (ours, theirs) in enumerate(zip(run.steps, plain.steps, strict=True), start=1):
        if ours.loss != theirs.loss:
            return f"step {number}: loss {ours.loss!r} for {theirs.loss!r}"
        if ours.grad_norm != theirs.grad_norm:
            return f"step {number}: gradient norm {ours.grad_norm!r} for {theirs.grad_norm!r}"
        different = sum(a != b for a, b in zip(ours.checksums, theirs.checksums, strict=True))
        if different:
            return f"step {number}: {different} of {len(ours.checksums)} parameters"
    return None
