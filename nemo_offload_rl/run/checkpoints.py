"""Writes checkpoint folders and the run's state in them; a folder appears complete or not at all, the best are kept."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from nemo_offload_rl.config.problems import did_you_mean
from nemo_offload_rl.data.loader import START, DataPosition
from nemo_offload_rl.storage.disk import sync, translate_disk_full, write_whole
from nemo_offload_rl.storage.manifest import CheckpointError, FileSum, UnreadableError, write_manifest

logger = logging.getLogger(__name__)

STATE_FILE = "training_state.json"
_FINISHED = re.compile(r"step_(\d+)")
_UNFINISHED_PREFIX = "tmp_step_"
_TRAIN = "train/"  # prefix of the metrics that each step has; only some steps have those of a validation


@dataclass(frozen=True)
class ValidationResult:
    """Holds the metrics of a validation after ``step`` steps; their names start with ``validation/``."""

    step: int
    metrics: dict[str, float]


@dataclass
class RunState:
    """Records the progress of a run.

    Attributes:
        step: number of finished steps.
        position: position of the next batch in the training data.
        validations: results of all validations, oldest first.
        run_dir: folder of the run's metrics and log.
        num_skipped: optimizer steps that were skipped, since loss or gradient was not finite.
    """

    run_dir: str
    step: int = 0
    position: DataPosition = START
    validations: list[ValidationResult] = field(default_factory=list)
    num_skipped: int = 0

    def write(self, folder: Path, metrics: Mapping[str, float]) -> None:
        """Writes the state, and the metrics by which checkpoints are ranked, into a checkpoint folder."""
        content = asdict(self) | {"metrics": dict(metrics)}
        write_whole(folder / STATE_FILE, json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the state of a checkpoint folder.

        Raises:
            UnreadableError: the state file is missing or has unexpected content.
        """
        return _read(
            folder,
            lambda content: cls(
                run_dir=str(Path(content["run_dir"])),
                step=int(content["step"]),
                position=DataPosition(**content["position"]),
                validations=[ValidationResult(**validation) for validation in content["validations"]],
                num_skipped=int(content.get("num_skipped", 0)),  # earlier versions wrote none
            ),
        )


def read_metrics_of(folder: Path) -> dict[str, float]:
    """Returns the metrics that were saved with a checkpoint.

    Raises:
        UnreadableError: the state file is missing or has unexpected content.
    """
    return _read(folder, lambda content: {name: float(value) for name, value in content["metrics"].items()})


def _read[T](folder: Path, take: Callable[[dict[str, Any]], T]) -> T:
    """Returns the values that `take` reads from a folder's state file.

    Raises:
        UnreadableError: the state file is missing or has unexpected content.
    """
    try:
        return take(json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UnreadableError(f"{STATE_FILE} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{STATE_FILE} is not what a run writes ({type(error).__name__}: {error})") from error


# Fills a checkpoint folder; returns, by name, the files that were hashed while they were written.
WriteCheckpoint = Callable[[Path], Mapping[str, FileSum]]


class WriteAtOnce:
    """Writes a checkpoint synchronously, before the run goes on; see `CheckpointWriter`.

    Args:
        write: fills the checkpoint's folder.
    """

    def __init__(self, write: WriteCheckpoint) -> None:
        self._write = write

    def start(self, folder: Path) -> None:
        """Does nothing: the state does not change before ``finish`` is called."""

    def is_written(self) -> bool:
        """Returns True: nothing is written in the background."""
        return True

    def finish(self, folder: Path) -> Mapping[str, FileSum]:
        """Writes all files of the checkpoint."""
        return self._write(folder)


class CheckpointWriter(Protocol):
    """Defines how a checkpoint's folder is filled, in two calls between which training may go on."""

    def start(self, folder: Path) -> None:
        """Takes a snapshot of the current state."""

    def is_written(self) -> bool:
        """Returns whether ``finish`` would return without waiting for files."""

    def finish(self, folder: Path) -> Mapping[str, FileSum]:
        """Fills the folder with that state; returns the same as ``WriteCheckpoint``."""


@dataclass(frozen=True)
class UnfinishedCheckpoint:
    """Describes a checkpoint that is being written, in a folder whose name does not yet count as a checkpoint's.

    Attributes:
        folder: the temporary folder.
        state: the run's state when the snapshot was taken.
        metrics: the run's metrics at that time.
        writer: fills the folder.
    """

    folder: Path
    state: RunState
    metrics: dict[str, float]
    writer: CheckpointWriter


@dataclass(frozen=True)
class CheckpointFolder:
    """Keeps the checkpoints of a run, each in a folder ``step_N``.

    Attributes:
        folder: the folder of all checkpoints; made with the first one.
        metric: the logged metric that ranks checkpoints, such as ``validation/accuracy``; None ranks them by age.
        higher_is_better: whether a larger value of that metric is better.
        keep_top_k: how many of the checkpoints whose step ``save_period`` divides are kept, the best ones; None keeps
            all of these.
        save_period: steps between the checkpoints that are ranked; the others are kept only as the newest ones.
        ft_keep_latest_k: how many of the newest checkpoints are kept, whatever their step; None is the newest one, or
            all if ``keep_top_k`` is None, too.
    """

    folder: Path
    metric: str | None
    higher_is_better: bool
    keep_top_k: int | None
    save_period: int = 1
    ft_keep_latest_k: int | None = None

    def start(self, state: RunState, metrics: Mapping[str, float], writer: CheckpointWriter) -> UnfinishedCheckpoint:
        """Begins a checkpoint in a temporary folder, which ``finish`` renames.

        Args:
            state: the run's current state, written as training_state.json.
            metrics: metrics of this step; one of them ranks the checkpoint.
            writer: writes all other files.

        Raises:
            DiskFullError: the disk is full; the temporary folder has been removed.
        """
        unfinished = self.folder / f"{_UNFINISHED_PREFIX}{state.step}"
        assert not self._finished_as(state).exists(), f"{self._finished_as(state)} was written before"
        self._warn_without_metric(state.step, metrics)
        with self._removing(unfinished), translate_disk_full(unfinished):
            unfinished.mkdir(parents=True)
            writer.start(unfinished)
        return UnfinishedCheckpoint(unfinished, copy.deepcopy(state), dict(metrics), writer)

    def finish(self, checkpoint: UnfinishedCheckpoint) -> Path:
        """Completes a checkpoint, writes its manifest, renames its folder, and removes those that need not be kept.

        Returns:
            The checkpoint's folder.

        Raises:
            DiskFullError: the disk is full; the temporary folder has been removed.
        """
        unfinished, finished = checkpoint.folder, self._finished_as(checkpoint.state)
        with self._removing(unfinished), translate_disk_full(unfinished):
            known = checkpoint.writer.finish(unfinished)
            checkpoint.state.write(unfinished, checkpoint.metrics)
            for path in [unfinished, *unfinished.rglob("*")]:
                sync(path)
            write_manifest(unfinished, known)
        unfinished.rename(finished)
        sync(self.folder)
        self._remove_others()
        return finished

    def _warn_without_metric(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.metric is None or not self.metric.startswith(_TRAIN) or self.metric in metrics:
            return
        name, *others = (key.replace("/", ":", 1) for key in (self.metric, *metrics) if key.startswith(_TRAIN))
        logger.warning(
            "Step %d has no %s, by which checkpointing.metric_name ranks checkpoints, so that this one counts as the "
            "worst%s",
            step,
            name,
            did_you_mean(name, others) or ".",
        )

    def _finished_as(self, state: RunState) -> Path:
        return self.folder / f"step_{state.step}"

    @staticmethod
    @contextmanager
    def _removing(folder: Path) -> Iterator[None]:
        """Removes a folder after an error: a full disk (which it would keep full), a dead worker, or a signal."""
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def newest_first(self) -> list[Path]:
        """Returns all checkpoints, the newest first."""
        return sorted(self._finished(), key=step_of, reverse=True)

    def require_folders(self) -> None:
        """Checks that no file has the name of a checkpoint's folder, which the run could then not save.

        Raises:
            CheckpointError: a file, or a link to nothing, has.
        """
        for path in sorted(self.folder.glob("step_*")):
            if _FINISHED.fullmatch(path.name) and not path.is_dir():
                raise CheckpointError(
                    f"{path} is no folder, but a checkpoint of step {step_of(path)} has that name; rename or remove it."
                )

    def set_aside(self, checkpoint: Path) -> Path:
        """Renames a damaged checkpoint so that it no longer counts as one and its step can be saved again.

        Returns:
            The new path.
        """
        names = (f"damaged_{checkpoint.name}" + (f"_{number}" if number else "") for number in itertools.count())
        aside = next(path for path in map(self.folder.joinpath, names) if not path.exists())
        checkpoint.rename(aside)
        sync(self.folder)
        return aside

    def remove_unfinished(self) -> None:
        """Removes temporary folders of a run that died while it saved."""
        for leftover in self.folder.glob(f"{_UNFINISHED_PREFIX}*"):
            logger.warning("Removing %s, which an earlier run did not finish writing.", leftover)
            shutil.rmtree(leftover)

    def _finished(self) -> list[Path]:
        return [path for path in self.folder.glob("step_*") if path.is_dir() and _FINISHED.fullmatch(path.name)]

    def _remove_others(self) -> None:
        """Removes what neither ``keep_top_k`` nor ``ft_keep_latest_k`` keeps, except the newest."""
        if self.keep_top_k is None and self.ft_keep_latest_k is None:
            return
        newest_first = self.newest_first()
        ranked = [checkpoint for checkpoint in newest_first if step_of(checkpoint) % self.save_period == 0]
        best = sorted(ranked, key=self._rank, reverse=True)[: self.keep_top_k]
        newest = newest_first[: max(1, self.ft_keep_latest_k or 0)]
        for other in newest_first:
            if other not in best and other not in newest:
                logger.info("Removing the checkpoint %s, which is neither among the best nor among the newest.", other)
                try:
                    shutil.rmtree(other)
                except OSError as error:  # a link, a protected folder, or files that another process reads over NFS
                    logger.warning("Checkpoint %s cannot be removed, and stays: %s.", other, error)

    def _rank(self, checkpoint: Path) -> tuple[float, int]:
        """Returns a sort key, larger for better checkpoints; those whose metric is absent or NaN are the worst."""
        try:
            value = None if self.metric is None else read_metrics_of(checkpoint).get(self.metric)
        except UnreadableError as error:
            logger.warning("Checkpoint %s counts as the worst: %s.", checkpoint, error)
            value = None
        if value is None or math.isnan(value):
            return float("-inf"), step_of(checkpoint)
        return value if self.higher_is_better else -value, step_of(checkpoint)


class NoCheckpoints:
    """Replaces ``CheckpointFolder`` where checkpointing is off: it writes nothing and finds nothing."""

    def start(self, state: RunState, metrics: Mapping[str, float], writer: CheckpointWriter) -> None:
        """Does nothing."""

    def finish(self, checkpoint: UnfinishedCheckpoint) -> Path:
        """Is never called, since ``start`` begins no checkpoint."""
        raise AssertionError("there are no checkpoints")

    def newest_first(self) -> list[Path]:
        """Returns an empty list."""
        return []

    def require_folders(self) -> None:
        """Does nothing."""

    def set_aside(self, checkpoint: Path) -> Path:
        """Is never called, since there are no checkpoints."""
        raise AssertionError("there are no checkpoints")

    def remove_unfinished(self) -> None:
        """Does nothing."""


Checkpoints = CheckpointFolder | NoCheckpoints


def step_of(checkpoint: Path) -> int:
    """Returns the number of steps in the name of a checkpoint's folder."""
    match = _FINISHED.fullmatch(checkpoint.name)
    assert match is not None
    return int(match.group(1))
