"""Runs an algorithm in the test's own process and records its outputs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.toy_policy import Recorded

from nemo_offload_rl.run.algorithm import Algorithm
from nemo_offload_rl.run.checkpoints import CheckpointFolder, Checkpoints, NoCheckpoints, RunState, WriteAtOnce
from nemo_offload_rl.run.interrupt import Interrupt
from nemo_offload_rl.run.train_loop import Run, Schedule, StopReason, TimeLimit, no_profile

SIX_STEPS = Schedule(
    max_num_steps=6, max_num_epochs=99, steps_per_epoch=4, val_period=2, val_at_start=True, val_at_end=True,
    save_period=2, target=None,
)  # fmt: skip


def make_run(
    algorithm: Algorithm, schedule: Schedule, checkpoints: Checkpoints | None = None, state: RunState | None = None, *,
    interrupt: Interrupt | None = None, limit: TimeLimit | None = None, writer: Any = None, profile: Any = no_profile,
) -> tuple[Run, Recorded]:  # fmt: skip
    """Returns a run of an algorithm that is yet to train, and its outputs."""
    outputs = Recorded()
    start = state or RunState("unused"), checkpoints or NoCheckpoints(), writer or WriteAtOnce(algorithm.save)
    return Run(algorithm, schedule, *start, outputs, interrupt or Interrupt(), limit, profile), outputs


def record(algorithm: Algorithm, schedule: Schedule = SIX_STEPS, *options: Any) -> tuple[StopReason, Recorded]:
    """Runs an algorithm; returns why it ended, and its outputs."""
    run, outputs = make_run(algorithm, schedule, *options)
    return run.train(), outputs


def record_with_a_break(
    make: Callable[[], Algorithm], folder: Path, metric: str, check_loaded: Callable[[Any], None] = lambda _: None
) -> dict[int, dict[str, float]]:
    """Runs four of six steps, then the rest with a new object that loads the checkpoint."""
    checkpoints = CheckpointFolder(folder, metric, higher_is_better=False, keep_top_k=1)
    _, before = record(make(), replace(SIX_STEPS, max_num_steps=4), checkpoints)
    newest, resumed = checkpoints.newest_first()[0], make()
    state = RunState.read(newest)
    resumed.position = state.position
    resumed.load(newest, state.step, state.num_skipped)
    check_loaded(resumed)
    _, after = record(resumed, SIX_STEPS, checkpoints, state)
    return {**before.without_timings(), **after.without_timings()}
