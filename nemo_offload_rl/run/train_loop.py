"""Runs the training loop of every algorithm: steps until a reason to stop, with validation, metrics and checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.environments.rewards import RewardError
from nemo_offload_rl.metrics.samples import JudgedAnswer
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.algorithm import Algorithm
from nemo_offload_rl.run.checkpoints import (
    Checkpoints,
    CheckpointWriter,
    RunState,
    UnfinishedCheckpoint,
    ValidationResult,
)
from nemo_offload_rl.run.interrupt import Interrupt
from nemo_offload_rl.storage.disk import DiskFullError

logger = logging.getLogger(__name__)


class StopReason(Enum):
    """Says why a run ended, as the user reads it."""

    STEPS = "all steps are done"
    EPOCHS = "all epochs of the training data are done"
    TARGET = "validation reached the recipe's target"
    REPLAYED = "all saved rollouts are replayed"
    TIME = "the time limit of checkpointing.checkpoint_must_save_by is reached"
    INTERRUPTED = "interrupted"

    @property
    def is_done(self) -> bool:
        """Whether the run has finished all of its work."""
        return self not in (StopReason.TIME, StopReason.INTERRUPTED)


@dataclass(frozen=True)
class StopTarget:
    """Names a validation metric, as logged, and the value at which training stops."""

    metric: str
    threshold: float

    def is_reached(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether the metrics reach the threshold: at most it for a loss, at least it for other metrics."""
        if self.metric not in metrics:
            return False
        value = metrics[self.metric]
        return value <= self.threshold if self.metric.endswith("loss") else value >= self.threshold


@dataclass(frozen=True)
class Schedule:
    """Says at which steps a run validates, saves and ends.

    Attributes:
        max_num_steps: the most steps of the run.
        max_num_epochs: the most passes over the training data.
        steps_per_epoch: steps of one pass; with dynamic sampling, which may draw several batches a step, the most.
        val_period: steps between validations; 0 for no periodic validation.
        val_at_start: whether to validate before the first step.
        val_at_end: whether to validate after the last step.
        save_period: steps between checkpoints.
        target: the validation metric and value at which to end early; None to run all steps.
        must_save_by_s: seconds, from the first step of this command, within which the run has to save and end; None for
            no limit.
        ft_save_period: steps between further checkpoints, from which a run that has failed resumes; None for none.
        last_replayed: the last step with saved rollouts to replay; None for a run that generates them.
    """

    max_num_steps: int
    max_num_epochs: int
    steps_per_epoch: int
    val_period: int
    val_at_start: bool
    val_at_end: bool
    save_period: int
    target: StopTarget | None
    must_save_by_s: float | None = None
    ft_save_period: int | None = None
    last_replayed: int | None = None

    def is_save_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step` steps."""
        periods = (self.save_period, self.ft_save_period)
        return any(period is not None and step % period == 0 for period in periods)

    @property
    def num_steps(self) -> int:
        """The steps of the whole run, if no target, signal or time limit ends it."""
        return min(self.max_num_steps, self.max_num_epochs * self.steps_per_epoch)


class TimeLimit:
    """Decides when a run has to stop so that its last checkpoint is on disk within the time limit.

    The runs of a command share one limit: a run that restarts after a failure gets only the time that is left.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end: float | None = None
        self._longest_step_s = 0.0
        self._longest_save_s = 0.0
        self._save_start_s: float | None = None

    def begin(self, must_save_by_s: float | None) -> None:
        """Begins a run with `must_save_by_s` seconds from now, or with the time that an earlier run has left.

        Args:
            must_save_by_s: seconds; None for no limit.
        """
        self._save_start_s = None
        if self._end is None and must_save_by_s is not None:
            self._end = self._clock() + must_save_by_s
            self._longest_step_s = self._longest_save_s = 0.0  # the warm start's times do not apply

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures a step, its validation included."""
        start = self._clock()
        yield
        self._longest_step_s = max(self._longest_step_s, self._clock() - start)

    def start_save(self) -> None:
        """Records that a checkpoint begins."""
        self._save_start_s = self._clock()

    def end_save(self, *, is_on_disk: bool) -> None:
        """Records that the checkpoint is on disk, and how long it took; or that it was given up."""
        assert self._save_start_s is not None
        if is_on_disk:
            self._longest_save_s = max(self._longest_save_s, self._clock() - self._save_start_s)
        self._save_start_s = None

    @property
    def is_over(self) -> bool:
        """Whether a step and its checkpoint, each as long as the longest so far, would end too late if they began now.

        After the step, its checkpoint waits for one that is still being written in the background.
        """
        if self._end is None:
            return False
        now, save_s = self._clock(), self._longest_save_s
        step_end = now + self._longest_step_s
        if self._save_start_s is not None:
            save_s = max(save_s, now - self._save_start_s)
            step_end = max(step_end, self._save_start_s + save_s)
        return step_end + save_s >= self._end


def no_profile(step: int, timer: Timer) -> AbstractContextManager[None]:
    """Returns a context that does nothing around a step."""
    del step, timer
    return nullcontext()


class Outputs(Protocol):
    """Defines where the metrics of a step go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores metrics of a step; a further call for the same step adds to them."""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the user a step, with all its metrics."""

    def show_answers(self, step: int, answers: Sequence[JudgedAnswer]) -> None:
        """Shows the user answers of a validation."""

    def sync(self) -> None:
        """Writes the stored metrics to the disk, so that they survive a power failure.

        Raises:
            DiskFullError: there is no space for them.
        """


class Run:
    """Drives an algorithm through its schedule.

    Args:
        algorithm: the algorithm to run.
        schedule: the steps at which the run validates, saves and ends.
        state: the state to start from; updated after every step.
        checkpoints: where to save.
        writer: fills a checkpoint's folder.
        outputs: stores and shows metrics.
        interrupt: says whether the run is to end after the current step.
        limit: the command's time limit; None for a limit of this run alone.
        profile: returns the context of a step, which may record it; takes the step and its timer.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        schedule: Schedule,
        state: RunState,
        checkpoints: Checkpoints,
        writer: CheckpointWriter,
        outputs: Outputs,
        interrupt: Interrupt,
        limit: TimeLimit | None = None,
        profile: Callable[[int, Timer], AbstractContextManager[None]] = no_profile,
    ) -> None:
        self._algorithm = algorithm
        self._schedule = schedule
        self._checkpoints = checkpoints
        self._writer = writer
        self._unfinished: UnfinishedCheckpoint | None = None
        self._outputs = outputs
        self._interrupt = interrupt
        self._limit = limit or TimeLimit()
        self._profile = profile
        self._timer = Timer()
        self._saved_step = state.step
        self._metrics: dict[str, float] = {}
        self.state = state

    def train(self) -> StopReason:
        """Runs steps until there is a reason to stop; then saves the last step, if there is space, and returns why.

        Raises:
            DataError, RewardError: a row or a reward cannot be used; the finished steps have been saved.
        """
        self._limit.begin(self._schedule.must_save_by_s)
        if self._lacks_validation():
            self._metrics = self._validate()
            self._finish()
        with self._interrupt.finishing():
            with self._saving_before_errors():
                while (reason := self._reason_to_stop()) is None:
                    self._step()
            self._save_last()
        if not self.is_saved:
            newest = (
                f"the newest checkpoint is of step {self._saved_step}" if self._saved_step else "there is no checkpoint"
            )
            logger.error("The run ends without a checkpoint of its last step, %d: %s.", self.state.step, newest)
        return reason

    @property
    def is_saved(self) -> bool:
        """Whether no step is lost if the run ends now: its state is on disk, or checkpoints are off."""
        return self.state.step == self._saved_step

    @contextmanager
    def _saving_before_errors(self) -> Iterator[None]:
        """Saves the finished steps if an error that the user can mend ends the run inside the `with` block.

        It does not if the policy is already that of the unfinished step, because training has begun.
        """
        try:
            yield
        except (DataError, RewardError):
            has_trained = self._interrupt.progress.in_step and "training" in self._timer.seconds()
            if not self.is_saved and not has_trained:
                self._algorithm.abandon_step()
                self._outputs.log(self.state.step, self._metrics)  # not there yet if the step's validation failed
                self._save_last()
            raise

    def _save_last(self) -> None:
        self._finish_save()
        if not self.is_saved:
            self._save()
            self._finish_save()

    def _step(self) -> None:
        start, progress = time.perf_counter(), self._interrupt.progress
        with self._limit.step():
            progress.in_step = True
            with self._profile(self.state.step + 1, self._timer):
                metrics = self._algorithm.step(self.state.step + 1, self._timer)
            metrics["performance/tokens_per_sec"] = metrics["train/num_tokens"] / (time.perf_counter() - start)
            self.state.step += 1
            progress.num_done, progress.in_step = self.state.step, False
            self.state.position = self._algorithm.position
            self.state.num_skipped = self._algorithm.num_skipped
            self._metrics = metrics
            if self._is_validation_due():
                metrics |= self._validate()
        if self._unfinished is not None and self._unfinished.writer.is_written():
            self._finish_save()
        self._outputs.log(self.state.step, metrics)  # before saving: a checkpoint's steps are all in the log
        if self._schedule.is_save_due(self.state.step) or self._reason_to_stop() is not None:
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
        return self._reason_to_end() or (StopReason.TIME if self._limit.is_over else None)

    def _reason_to_end(self) -> StopReason | None:
        if self.state.step >= self._schedule.max_num_steps:
            return StopReason.STEPS
        if self.state.position.epoch >= self._schedule.max_num_epochs:
            return StopReason.EPOCHS
        if self._schedule.last_replayed is not None and self.state.step >= self._schedule.last_replayed:
            return StopReason.REPLAYED
        return None

    def _lacks_validation(self) -> bool:
        """Returns whether a validation comes before the first step: at the start, or one that an error has ended."""
        if self.state.step == 0:
            return self._schedule.val_at_start
        newest = self.state.validations[-1].step if self.state.validations else 0
        return newest < self.state.step and self._is_validation_due()

    def _is_validation_due(self) -> bool:
        period = self._schedule.val_period
        if period > 0 and self.state.step % period == 0:
            return True
        return self._schedule.val_at_end and self._reason_to_end() is not None

    def _validate(self) -> dict[str, float]:
        with self._timer.phase("validation"):
            metrics = self._algorithm.validate(self.state.step)
        if self._algorithm.validation_answers:
            self._outputs.show_answers(self.state.step, self._algorithm.validation_answers)
        self.state.validations.append(ValidationResult(self.state.step, metrics))
        return dict(metrics)

    def _save(self) -> None:
        """Begins a checkpoint once the last one is finished; finishes it, too, unless it is written asynchronously."""
        self._finish_save()
        self._limit.start_save()
        try:
            with self._timer.phase("checkpointing"):
                self._outputs.sync()  # a checkpoint on disk never has steps without metrics
                self._unfinished = self._checkpoints.start(self.state, self._metrics, self._writer)
        except DiskFullError as error:
            self._limit.end_save(is_on_disk=False)
            self._warn_not_saved(self.state.step, error)
            return
        if self._unfinished is None:  # checkpoints are off
            self._limit.end_save(is_on_disk=False)
            self._saved_step = self.state.step
        elif self._unfinished.writer.is_written():
            self._finish_save()

    def _finish_save(self) -> None:
        """Waits until a checkpoint that is being written is on disk; does nothing without one."""
        if self._unfinished is None:
            return
        unfinished, self._unfinished = self._unfinished, None
        try:
            with self._timer.phase("checkpointing"):
                checkpoint = self._checkpoints.finish(unfinished)
        except DiskFullError as error:
            self._limit.end_save(is_on_disk=False)
            self._warn_not_saved(unfinished.state.step, error)
            return
        self._limit.end_save(is_on_disk=True)
        self._saved_step = unfinished.state.step
        self._interrupt.progress.num_saved, self._interrupt.progress.checkpoint = self._saved_step, checkpoint

    @staticmethod
    def _warn_not_saved(step: int, error: DiskFullError) -> None:
        logger.warning("Step %d is not saved: %s. Free some space: the next save tries again.", step, error)
