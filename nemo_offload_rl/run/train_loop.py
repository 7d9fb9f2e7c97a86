"""The frame of every run: steps until a reason to stop; after each, what is due: validation, metrics, a checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.algorithm import Algorithm
from nemo_offload_rl.run.checkpoints import Checkpoints, RunState, ValidationResult, WriteCheckpoint
from nemo_offload_rl.run.interrupt import Interrupt
from nemo_offload_rl.storage.disk import DiskFullError

logger = logging.getLogger(__name__)


class StopReason(Enum):
    """Why a run ended, as the user reads it."""

    STEPS = "all steps are done"
    EPOCHS = "the training data was used as often as the recipe says"
    TARGET = "validation reached the recipe's target"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class StopTarget:
    """A validation metric, as logged, and the value at which training has done its work."""

    metric: str
    threshold: float

    def is_reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metric is there and at the threshold or beyond: below it for a loss, above it otherwise."""
        if self.metric not in metrics:
            return False
        value = metrics[self.metric]
        return value <= self.threshold if self.metric.endswith("loss") else value >= self.threshold


@dataclass(frozen=True)
class Schedule:
    """The steps at which a run validates, saves and ends.

    Attributes:
        max_num_steps: at most so many steps.
        max_num_epochs: at most so many passes over the training data.
        val_period: steps between validations; 0 for none in between.
        val_at_start: validate before the first step.
        val_at_end: validate after the last step.
        save_period: steps between checkpoints.
        target: where to end early; None for nowhere.
    """

    max_num_steps: int
    max_num_epochs: int
    val_period: int
    val_at_start: bool
    val_at_end: bool
    save_period: int
    target: StopTarget | None


class Outputs(Protocol):
    """The outputs of a step's metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores metrics of a step; more for the same step are added to them."""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the user a step, with all its metrics."""


class Run:
    """Drives an algorithm through its schedule.

    Args:
        algorithm: what is run.
        schedule: when what is due.
        state: where it starts; kept up to date.
        checkpoints: where to save.
        write_checkpoint: fills a checkpoint's folder.
        outputs: everything that stores or shows metrics.
        interrupt: asks for an end after the current step.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        schedule: Schedule,
        state: RunState,
        checkpoints: Checkpoints,
        write_checkpoint: WriteCheckpoint,
        outputs: Outputs,
        interrupt: Interrupt,
    ) -> None:
        self._algorithm = algorithm
        self._schedule = schedule
        self._checkpoints = checkpoints
        self._write_checkpoint = write_checkpoint
        self._outputs = outputs
        self._interrupt = interrupt
        self._timer = Timer()
        self._saved_step = state.step
        self._metrics: dict[str, float] = {}
        self.state = state

    def train(self) -> StopReason:
        """Steps until there is a reason to stop. Whatever the reason, the last step is saved, if there is space."""
        if self.state.step == 0 and self._schedule.val_at_start:
            self._metrics = self._validate()
            self._finish()
        with self._interrupt.finishing():
            while (reason := self._reason_to_stop()) is None:
                self._step()
            if not self.is_saved:
                self._save()
        if not self.is_saved:
            newest = f"the newest that is there is of step {self._saved_step}" if self._saved_step else "none is there"
            logger.error("The run ends, and its last state, of step %d, is not on disk: %s.", self.state.step, newest)
        return reason

    @property
    def is_saved(self) -> bool:
        """Whether the state is on disk, if any is to be there: nothing is lost where the run ends here."""
        return self.state.step == self._saved_step

    def _step(self) -> None:
        start, progress = time.perf_counter(), self._interrupt.progress
        progress.in_step = True
        metrics = self._algorithm.step(self.state.step + 1, self._timer)
        metrics["performance/tokens_per_sec"] = metrics["train/num_tokens"] / (time.perf_counter() - start)
        self.state.step += 1
        progress.num_done, progress.in_step = self.state.step, False
        self.state.position = self._algorithm.position
        self._metrics = metrics
        if self._is_validation_due():
            metrics |= self._validate()
        self._outputs.log(self.state.step, metrics)  # before saving: a checkpoint's steps are all in the log
        if self.state.step % self._schedule.save_period == 0 or self._reason_to_stop() is not None:
            self._save()
        metrics["timing/train/total_step_time"] = time.perf_counter() - start
        self._finish()

    def _finish(self) -> None:
        self._metrics |= {f"timing/train/{phase}": seconds for phase, seconds in self._timer.seconds().items()}
        self._timer.reset()
        self._outputs.log(self.state.step, self._metrics)
        self._outputs.show(self.state.step, self._metrics)

    def _reason_to_stop(self) -> StopReason | None:
        schedule = self._schedule
        if self._interrupt.requested:
            return StopReason.INTERRUPTED
        newest = self.state.validations[-1].metrics if self.state.validations else {}
        if schedule.target is not None and schedule.target.is_reached(newest):
            return StopReason.TARGET
        return self._reason_to_end()

    def _reason_to_end(self) -> StopReason | None:
        if self.state.step >= self._schedule.max_num_steps:
            return StopReason.STEPS
        if self.state.position.epoch >= self._schedule.max_num_epochs:
            return StopReason.EPOCHS
        return None

    def _is_validation_due(self) -> bool:
        period = self._schedule.val_period
        if period > 0 and self.state.step % period == 0:
            return True
        return self._schedule.val_at_end and self._reason_to_end() is not None

    def _validate(self) -> dict[str, float]:
        with self._timer.phase("validation"):
            metrics = self._algorithm.validate(self.state.step)
        self.state.validations.append(ValidationResult(self.state.step, metrics))
        return dict(metrics)

    def _save(self) -> None:
        try:
            with self._timer.phase("checkpointing"):
                checkpoint = self._checkpoints.save(self.state, self._metrics, self._write_checkpoint)
        except DiskFullError as error:
            logger.warning(
                "Step %d is not saved: %s. Free some space: the next save tries again.", self.state.step, error
            )
            return
        self._saved_step = self.state.step
        if checkpoint is not None:
            self._interrupt.progress.num_saved, self._interrupt.progress.checkpoint = self.state.step, checkpoint
