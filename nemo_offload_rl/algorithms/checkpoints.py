"""Checkpoint folders: each appears whole or not at all, and the best are kept."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_offload_rl.algorithms.state import TrainingState, read_metrics_of

logger = logging.getLogger(__name__)

_FINISHED = re.compile(r"step_(\d+)")
_UNFINISHED_PREFIX = "tmp_step_"


class CheckpointFolder:
    """The checkpoints of a run, ``step_N`` each.

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

    def save(self, state: TrainingState, metrics: Mapping[str, float], write: Callable[[Path], None]) -> Path:
        """Writes a checkpoint beside the others, moves it into place, and removes the worst.

        Args:
            state: written as training_state.json.
            metrics: of this step; one of them ranks the checkpoint.
            write: fills a folder with the rest.

        Returns:
            The checkpoint's folder.
        """
        unfinished = self._folder / f"{_UNFINISHED_PREFIX}{state.step}"
        finished = self._folder / f"step_{state.step}"
        assert not finished.exists(), f"{finished} was written before"
        unfinished.mkdir(parents=True)
        write(unfinished)
        state.write(unfinished, metrics)
        _flush_to_disk(unfinished)
        unfinished.rename(finished)
        _flush_to_disk(self._folder, recurse=False)
        self._remove_worst()
        return finished

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        return max(self._finished(), key=_step_of, default=None)

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
        newest_first = sorted(self._finished(), key=_step_of, reverse=True)
        newest, older = newest_first[0], newest_first[1:]
        for worst in sorted(older, key=self._rank, reverse=True)[self._keep_top_k - 1 :]:
            logger.info("Removing the checkpoint %s: %d better ones are kept.", worst, self._keep_top_k)
            shutil.rmtree(worst)
        assert newest.exists()

    def _rank(self, checkpoint: Path) -> tuple[float, int]:
        """Orders checkpoints from worst to best; one without the metric is worse than any with it."""
        value = None if self._metric is None else read_metrics_of(checkpoint).get(self._metric)
        if value is None:
            return float("-inf"), _step_of(checkpoint)
        return value if self._higher_is_better else -value, _step_of(checkpoint)


class NoCheckpoints:
    """Stands in for ``CheckpointFolder`` where checkpointing is off: nothing is written, nothing is found."""

    def save(self, state: TrainingState, metrics: Mapping[str, float], write: Callable[[Path], None]) -> None:
        """Writes nothing."""

    def latest(self) -> None:
        """Finds nothing."""

    def remove_unfinished(self) -> None:
        """Removes nothing."""


Checkpoints = CheckpointFolder | NoCheckpoints


def _step_of(checkpoint: Path) -> int:
    match = _FINISHED.fullmatch(checkpoint.name)
    assert match is not None
    return int(match.group(1))


def _flush_to_disk(folder: Path, recurse: bool = True) -> None:
    paths = [folder, *folder.rglob("*")] if recurse else [folder]
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
