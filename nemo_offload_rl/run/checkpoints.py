"""Checkpoint folders and the state of a run in them: each folder appears whole or not at all, and the best are kept."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from nemo_offload_rl.data.loader import START, DataPosition
from nemo_offload_rl.storage.checksum import FileSum
from nemo_offload_rl.storage.disk import full_disk_in_words, sync, write_whole
from nemo_offload_rl.storage.manifest import MANIFEST_FILE, DamagedError, write_manifest

logger = logging.getLogger(__name__)

STATE_FILE = "training_state.json"
_FINISHED = re.compile(r"step_(\d+)")
_UNFINISHED_PREFIX = "tmp_step_"


@dataclass(frozen=True)
class ValidationResult:
    """Holds the metrics of a validation after ``step`` steps; their names start with ``validation/``."""

    step: int
    metrics: dict[str, float]


@dataclass
class RunState:
    """Records the progress of a run.

    Attributes:
        step: whole steps done.
        position: where the training data goes on.
        validations: all of them, oldest first.
        run_dir: folder of the run's metrics and log.
    """

    run_dir: str
    step: int = 0
    position: DataPosition = START
    validations: list[ValidationResult] = field(default_factory=list)

    def write(self, folder: Path, metrics: Mapping[str, float]) -> None:
        """Writes the state, and the metrics that the checkpoint is ranked by, into a checkpoint folder."""
        content = asdict(self) | {"metrics": dict(metrics), "manifest": MANIFEST_FILE}
        write_whole(folder / STATE_FILE, json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the state of a checkpoint folder.

        Raises:
            DamagedError: it is not what was written.
        """
        return _read(
            folder,
            lambda content: cls(
                run_dir=str(Path(content["run_dir"])),
                step=int(content["step"]),
                position=DataPosition(**content["position"]),
                validations=[ValidationResult(**validation) for validation in content["validations"]],
            ),
        )


def read_metrics_of(folder: Path) -> dict[str, float]:
    """Returns the metrics that a checkpoint folder was written with.

    Raises:
        DamagedError: its state is not what was written.
    """
    return _read(folder, lambda content: {name: float(value) for name, value in content["metrics"].items()})


def was_written_with_manifest(folder: Path) -> bool:
    """Returns whether a checkpoint folder must have a manifest; those of earlier versions have none.

    Raises:
        DamagedError: its state is not what was written.
    """
    return _read(folder, lambda content: "manifest" in content)


def _read[T](folder: Path, take: Callable[[dict[str, Any]], T]) -> T:
    """Returns the values taken from a folder's state.

    Raises:
        DamagedError: it is not what was written.
    """
    try:
        return take(json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise DamagedError(f"{STATE_FILE} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{STATE_FILE} is not what was written ({type(error).__name__}: {error})") from error


# Fills a folder; returns what those of its files are that were hashed while they were written, by name.
WriteCheckpoint = Callable[[Path], Mapping[str, FileSum]]


class WriteAtOnce:
    """Has the whole of a checkpoint written before the run goes on.

    Args:
        write: fills its folder.
    """

    def __init__(self, write: WriteCheckpoint) -> None:
        self._write = write

    def start(self, folder: Path) -> None:
        """Takes nothing: the state is still that of now when ``finish`` is called."""

    def is_written(self) -> bool:
        """Returns True: nothing is written beside the run."""
        return True

    def finish(self, folder: Path) -> Mapping[str, FileSum]:
        """Writes all."""
        return self._write(folder)


class CheckpointWriter(Protocol):
    """Fills a checkpoint's folder in two parts, between which the run may go on."""

    def start(self, folder: Path) -> None:
        """Takes the state of now."""

    def is_written(self) -> bool:
        """Returns whether ``finish`` would not wait for files."""

    def finish(self, folder: Path) -> Mapping[str, FileSum]:
        """Fills the folder with that state; returns what ``WriteCheckpoint`` does."""


@dataclass(frozen=True)
class UnfinishedCheckpoint:
    """Describes a checkpoint that is being written, under a name by which it does not count as one.

    Attributes:
        folder: where it is now.
        state: of the run when its state was taken.
        metrics: of the run at that time.
        writer: fills the folder.
    """

    folder: Path
    state: RunState
    metrics: dict[str, float]
    writer: CheckpointWriter


class CheckpointFolder:
    """Keeps the checkpoints of a run, ``step_N`` each.

    Args:
        folder: where they are; made with the first one.
        metric: by which they are ranked, as logged (``validation/accuracy``); None ranks them by age.
        higher_is_better: whether a larger value of that metric is better.
        keep_top_k: how many are kept, of which the newest is always one; None keeps all.
    """

    def __init__(self, folder: Path, metric: str | None, higher_is_better: bool, keep_top_k: int | None) -> None:
        self._folder = Path(folder)
        self._metric = metric
        self._higher_is_better = higher_is_better
        self._keep_top_k = keep_top_k

    def start(self, state: RunState, metrics: Mapping[str, float], writer: CheckpointWriter) -> UnfinishedCheckpoint:
        """Begins a checkpoint beside the others; until it is finished it is none.

        Args:
            state: of now, written as training_state.json.
            metrics: of this step; one of them ranks the checkpoint.
            writer: fills a folder with the rest.

        Raises:
            DiskFullError: there is no space; what was written has been removed.
        """
        unfinished = self._folder / f"{_UNFINISHED_PREFIX}{state.step}"
        assert not self._finished_as(state).exists(), f"{self._finished_as(state)} was written before"
        with self._removing(unfinished), full_disk_in_words(unfinished):
            unfinished.mkdir(parents=True)
            writer.start(unfinished)
        return UnfinishedCheckpoint(unfinished, copy.deepcopy(state), dict(metrics), writer)

    def finish(self, checkpoint: UnfinishedCheckpoint) -> Path:
        """Completes a checkpoint, its manifest last, moves it into place, and removes the worst.

        Returns:
            The checkpoint's folder.

        Raises:
            DiskFullError: there is no space; what was written has been removed.
        """
        unfinished, finished = checkpoint.folder, self._finished_as(checkpoint.state)
        with self._removing(unfinished), full_disk_in_words(unfinished):
            known = checkpoint.writer.finish(unfinished)
            checkpoint.state.write(unfinished, checkpoint.metrics)
            for path in [unfinished, *unfinished.rglob("*")]:
                sync(path)
            write_manifest(unfinished, known)
        unfinished.rename(finished)
        sync(self._folder)
        self._remove_worst()
        return finished

    def _finished_as(self, state: RunState) -> Path:
        return self._folder / f"step_{state.step}"

    @staticmethod
    @contextmanager
    def _removing(folder: Path) -> Iterator[None]:
        """Removes a folder after an error: of a full disk, which it would keep full, of a dead worker, a signal."""
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def newest_first(self) -> list[Path]:
        """Returns all checkpoints, the newest first."""
        return sorted(self._finished(), key=_step_of, reverse=True)

    def set_aside(self, checkpoint: Path) -> Path:
        """Gives a checkpoint a name under which it is none, so that its step can be saved again; returns it."""
        names = (f"damaged_{checkpoint.name}" + (f"_{number}" if number else "") for number in itertools.count())
        aside = next(path for path in map(self._folder.joinpath, names) if not path.exists())
        checkpoint.rename(aside)
        sync(self._folder)
        return aside

    def remove_unfinished(self) -> None:
        """Clears away what a run that died while it saved has left."""
        for leftover in self._folder.glob(f"{_UNFINISHED_PREFIX}*"):
            logger.warning("Removing %s, which a run has not finished writing.", leftover)
            shutil.rmtree(leftover)

    def _finished(self) -> list[Path]:
        return [path for path in self._folder.glob("step_*") if path.is_dir() and _FINISHED.fullmatch(path.name)]

    def _remove_worst(self) -> None:
        if self._keep_top_k is None:
            return
        newest, *older = self.newest_first()
        for worst in sorted(older, key=self._rank, reverse=True)[self._keep_top_k - 1 :]:
            logger.info("Removing the checkpoint %s: %d better ones are kept.", worst, self._keep_top_k)
            shutil.rmtree(worst)
        assert newest.exists()

    def _rank(self, checkpoint: Path) -> tuple[float, int]:
        """Orders checkpoints from worst to best; one without the metric is worse than any with it."""
        try:
            value = None if self._metric is None else read_metrics_of(checkpoint).get(self._metric)
        except DamagedError as error:
            logger.warning("Checkpoint %s is damaged: %s. It counts as the worst.", checkpoint, error)
            value = None
        if value is None:
            return float("-inf"), _step_of(checkpoint)
        return value if self._higher_is_better else -value, _step_of(checkpoint)


class NoCheckpoints:
    """Stands in for ``CheckpointFolder`` where checkpointing is off: nothing is written, nothing is found."""

    def start(self, state: RunState, metrics: Mapping[str, float], writer: CheckpointWriter) -> None:
        """Begins nothing."""

    def finish(self, checkpoint: UnfinishedCheckpoint) -> Path:
        """Is not called: nothing is begun."""
        raise AssertionError("there are no checkpoints")

    def newest_first(self) -> list[Path]:
        """Finds nothing."""
        return []

    def set_aside(self, checkpoint: Path) -> Path:
        """Is not called: there are none."""
        raise AssertionError("there are no checkpoints")

    def remove_unfinished(self) -> None:
        """Removes nothing."""


Checkpoints = CheckpointFolder | NoCheckpoints


def _step_of(checkpoint: Path) -> int:
    match = _FINISHED.fullmatch(checkpoint.name)
    assert match is not None
    return int(match.group(1))
