"""Samples the rollouts of later steps while a step trains: asynchronous GRPO."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_offload_rl.algorithms.group_sampling import GroupSampler
from nemo_offload_rl.algorithms.rollouts import RolloutMaker, Rollouts
from nemo_offload_rl.algorithms.saved_rollouts import ReplayedRollouts, as_plain, from_plain, save_tensors
from nemo_offload_rl.config.schema.algorithm_sections import AsyncGRPOConfig
from nemo_offload_rl.data.loader import DataPosition
from nemo_offload_rl.generation.interface import GenerationError, InFlightUpdates
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.storage.disk import translate_disk_full

logger = logging.getLogger(__name__)

# How long `close` waits for a batch whose engines are being ended.
_CLOSE_S = 30.0

ROLLOUTS_FILE = "rollouts.pt"
_FORMAT = 1


def in_flight_updates(section: AsyncGRPOConfig) -> InFlightUpdates | None:
    """Returns how weights change while answers are generated, by `grpo.async_grpo`; None if they do not."""
    if not section["enabled"] or not section["in_flight_weight_updates"]:
        return None
    return InFlightUpdates(recomputes_kv_cache=section["recompute_kv_cache_after_weight_updates"])


@dataclass(frozen=True)
class _StepRollouts:
    """Holds the rollouts of a step that has not trained on them yet.

    Attributes:
        rollouts: of the whole step.
        metrics: of all rollouts that were sampled for it.
        version: number of the policy's steps whose weights sampled it.
        position: where the step after it starts in the training data.
    """

    rollouts: Rollouts
    metrics: dict[str, float]
    version: int
    position: DataPosition


class RolloutQueue:
    """Samples step after step in a thread, as long as rollouts will not be too old when their step trains on them.

    Rollouts of step s that were sampled with the weights after v steps have the age s - 1 - v: the number of updates
    that they lack. Unless weights change in flight, all rollouts of a step have one version, since weights change
    between two steps' rollouts; with an age of at most 1 the versions, and so all numbers, then do not depend on what
    is faster, with more they do. In flight, a step's rollouts go on with newer weights, and v is the oldest version.

    Args:
        sampler: samples the rollouts of a step; only the thread calls it.
        max_age: the most updates that a step's rollouts may lack; 0 samples no step ahead.
        last_step: the last step of the run.
        num_epochs: epochs after which no further prompts are drawn.
        in_flight: whether weights change while rollouts are being sampled.
        sampled_with: what must agree between the runs that write and read a checkpoint's rollouts, by name.
    """

    def __init__(
        self,
        sampler: GroupSampler,
        *,
        max_age: int,
        last_step: int,
        num_epochs: int,
        in_flight: bool,
        sampled_with: Mapping[str, Any],
    ) -> None:
        self._sampler = sampler
        self._max_age = max_age
        self._last_step = last_step
        self._num_epochs = num_epochs
        self._in_flight = in_flight
        self._sampled_with = {"format": _FORMAT, **sampled_with}
        self._position: DataPosition | None = None
        self._memory: dict[str, float] = {}
        self._taken_at: float | None = None  # when the last step got its rollouts
        self._waited_s = 0.0  # for rollouts, since then: also validations and checkpoints wait
        # What follows is read and changed under this condition alone.
        self._changed = threading.Condition()
        self._ready: dict[int, _StepRollouts] = {}
        self._next = 1
        self._version = 0
        self._held_after: int | None = None
        self._is_sampling = False
        self._has_ended = False
        self._is_closed = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def rollout(self) -> RolloutMaker | ReplayedRollouts:
        """What generates and judges answers; call it inside `updating_weights`."""
        return self._sampler.rollout

    @property
    def position(self) -> DataPosition:
        """Where the next step to train starts in the training data."""
        return self._sampler.position if self._position is None else self._position

    def __call__(
        self, step: int, timer: Timer, on_last_answers: Callable[[], None] = lambda: None
    ) -> tuple[Rollouts, dict[str, float]]:
        """Returns the rollouts of a step and their metrics; waits until they are there.

        Args:
            step: the step, whose `updating_weights` has been passed.
            timer: records the phase ``wait_for_rollouts``.
            on_last_answers: called first: answers are generated on other GPUs.

        Raises:
            DataError, RewardError, GenerationError: sampling this step's rollouts has failed.
        """
        on_last_answers()
        with self._waiting(timer), self._changed:
            self._changed.wait_for(lambda: step in self._ready or self._has_ended)
            if step not in self._ready:
                assert self._error is not None, f"step {step} is within the run"
                raise self._error
            taken, waiting = self._ready.pop(step), len(self._ready)
        self._position = taken.position
        busy = self._busy_shares(taken)
        age = float(step - 1 - taken.version)
        batch = taken.rollouts.batch
        # A checkpoint's rollouts have it, or not, as the run that sampled them had weights in flight.
        if (num_updates := batch.pop("num_updates", None)) is not None:
            tokens = batch["token_mask"]
            age -= float((num_updates * tokens).sum() / tokens.sum().clamp(min=1))
        return taken.rollouts, taken.metrics | busy | {
            "train/avg_trajectory_age": age,
            "performance/steps_sampled_ahead": float(waiting),
        }

    @contextmanager
    def _waiting(self, timer: Timer) -> Iterator[None]:
        """Counts the time in the `with` block as that in which training waits for rollouts."""
        start = time.perf_counter()
        with timer.phase("wait_for_rollouts"):
            yield
        self._waited_s += time.perf_counter() - start

    def _busy_shares(self, taken: _StepRollouts) -> dict[str, float]:
        """Returns the shares of the last step's time in which training, and generation, did not wait for the other."""
        last, self._taken_at = self._taken_at, time.perf_counter()
        waited_s, self._waited_s = self._waited_s, 0.0
        seconds = {
            name: taken.metrics.get(f"timing/rollouts/{name}", 0.0) for name in ("sampling", "rewards", "waiting")
        }
        whole_s = sum(seconds.values())
        shares = {"generation": 1 - seconds["waiting"] / whole_s} if whole_s else {}
        if last is not None:
            shares["training"] = max(0.0, 1 - waited_s / (self._taken_at - last))
        return {f"performance/{name}_busy_share": share for name, share in shares.items()}

    def needs_weights(self, version: int) -> bool:
        """Returns whether there is more to sample, and the engines lack this version; after a validation they have it.

        Args:
            version: number of the policy's steps.
        """
        with self._changed:
            return self._thread is None or (self._version != version and not self._has_ended)

    @contextmanager
    def updating_weights(self, version: int, timer: Timer, *, drains: bool = False) -> Iterator[None]:
        """Holds sampling back inside the `with` block, after which engines have other weights.

        It waits until no rollouts are being sampled. Unless each step needs the newest weights, it first lets those of
        the next step to train be sampled: they are needed at once, and their age does not depend on who was faster.
        In flight it does not wait: engines hold between two of their steps.

        Args:
            version: number of the policy's steps whose weights the engines have then.
            timer: records the phase ``wait_for_rollouts``.
            drains: whether to wait in flight, too, for other requests to the engines.

        Raises:
            GenerationError: engines have failed meanwhile, and may hang in an update.
        """
        with self._waiting(timer), self._changed:
            self._held_after = version + 1 if self._max_age > 0 else version
            self._changed.notify_all()
            if self._thread is not None and (drains or not self._in_flight):
                until = min(self._held_after, self._last_step)
                self._changed.wait_for(lambda: self._has_ended or (not self._is_sampling and self._next > until))
            if isinstance(self._error, GenerationError):
                raise self._error
        yield  # a failure here ends the run: sampling stays held back
        with self._changed:
            self._version, self._held_after = version, None
            if self._thread is None:
                self._next = version + 1 + len(self._ready)
                if self._position is None:
                    self._position = self._sampler.position
                self._thread = threading.Thread(target=self._sample_steps, name="rollouts", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def save_unused(self, folder: Path) -> None:
        """Writes the finished rollouts that no step has used into a checkpoint's folder; no file where there are none.

        With an age of 1 it waits for those of the next step, which would wait for them anyway. A resumed run would
        sample them with newer weights, so that its numbers would depend on what was faster.

        Raises:
            DiskFullError: the disk is full.
        """
        with self._waiting(Timer()), self._changed:
            if self._max_age == 1 and self._thread is not None:
                self._changed.wait_for(lambda: self._ready or self._has_ended)
            unused, has_failed = sorted(self._ready.items()), self._error is not None
        if self._max_age == 1 and has_failed and not unused:
            logger.warning(
                "The checkpoint has no rollouts of the next step, as sampling them has failed: a run that resumes from "
                "it samples them with newer weights, and its numbers differ from those of an uninterrupted run."
            )
        if not unused:
            return
        steps = [
            {
                "step": step,
                "version": sampled.version,
                "position": (sampled.position.epoch, sampled.position.samples),
                "metrics": sampled.metrics,
                "rollouts": as_plain(sampled.rollouts),
            }
            for step, sampled in unused
        ]
        with translate_disk_full(folder / ROLLOUTS_FILE):
            save_tensors(folder / ROLLOUTS_FILE, {"sampled_with": self._sampled_with, "steps": steps})

    def load_unused(self, folder: Path, step: int) -> None:
        """Reads what `save_unused` has written to the checkpoint of a step; before anything is sampled.

        Rollouts that would be too old now are left out, with those behind them, and all if the recipe would sample
        others: the data's position, which is that of the checkpoint's next step, goes on only behind those that stay.
        """
        path = folder / ROLLOUTS_FILE
        if not path.exists():
            return
        saved = torch.load(path, weights_only=True)
        differing = [name for name, value in self._sampled_with.items() if saved["sampled_with"].get(name) != value]
        if differing:
            logger.info("The checkpoint's rollouts are of other values of %s: sampled again.", ", ".join(differing))
            return
        self._position = self._sampler.position
        for one in saved["steps"]:
            if one["step"] - 1 - one["version"] > self._max_age:
                break
            position = DataPosition(*one["position"])
            rollouts = from_plain(one["rollouts"])
            self._ready[one["step"]] = _StepRollouts(rollouts, one["metrics"], one["version"], position)
            self._sampler.prompts.position = position
        logger.info(
            "The checkpoint has the rollouts of %d steps that were sampled ahead; %d of them are not too old.",
            len(saved["steps"]),
            len(self._ready),
        )

    def shaped_rewards(self, rollouts: Rollouts) -> torch.Tensor:
        """See `GroupSampler`."""
        return self._sampler.shaped_rewards(rollouts)

    def memory_stats(self) -> dict[str, float]:
        """Returns the engines' memory after the newest rollouts, without waiting for those that are under way."""
        with self._changed:
            return self._memory

    def close(self) -> None:
        """Samples no further rollouts; what is under way fails once the engines have been ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Waits for the thread, after `close` and after the engines have been ended."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                logger.warning("Sampling ahead of training has not ended within %g s, and is left behind.", _CLOSE_S)

    def _sample_steps(self) -> None:
        error: Exception | None = None
        try:
            while self._sample_next():
                pass
        except Exception as raised:  # noqa: BLE001 - the step that needs these rollouts raises it
            error = raised
        except BaseException as raised:  # noqa: BLE001 - a panic of the Rust library tokenizers, or Ray's SystemExit
            error = RuntimeError(f"Sampling ahead ended by {raised!r}")
        with self._changed:
            self._error, self._is_sampling, self._has_ended = error, False, True
            self._changed.notify_all()
            # The kernel ends a process of rewards with the thread that started it, and a validation may follow.
            self._changed.wait_for(lambda: self._is_closed)

    def _sample_next(self) -> bool:
        """Samples the next step's rollouts as soon as it may; returns False if there is nothing left to sample."""
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._may_sample)
            if self._is_closed or self._is_at_end:
                return False
            step, version = self._next, self._version
            self._is_sampling = True
        waited_s = time.perf_counter() - start
        timer = Timer()
        rollouts, metrics = self._sampler(step, timer, num_updates=lambda: self._num_updates_since(version))
        memory = self._sampler.memory_stats()
        seconds = {"waiting": waited_s, **timer.seconds()}
        metrics |= {f"timing/rollouts/{phase}": value for phase, value in seconds.items()}
        with self._changed:
            self._ready[step] = _StepRollouts(rollouts, metrics, version, self._sampler.position)
            self._memory = memory
            self._next += 1
            self._is_sampling = False
            self._changed.notify_all()
        return True

    def _num_updates_since(self, version: int) -> int:
        with self._changed:
            return self._version - version

    @property
    def _is_at_end(self) -> bool:
        """Whether all rollouts of the run have been sampled."""
        if self._is_sampling:
            return False
        return self._next > self._last_step or self._sampler.position.epoch >= self._num_epochs

    @property
    def _may_sample(self) -> bool:
        """Whether the thread may sample the next step's rollouts now, or end."""
        if self._is_at_end:
            return True
        if self._held_after is not None and self._next > self._held_after:
            return False
        return self._next - 1 - self._version <= self._max_age
