"""Writes the metrics of a run: metrics.jsonl always, TensorBoard and wandb where the recipe asks for them."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from nemo_offload_rl.storage.disk import disk_full, is_disk_full, sync, translate_disk_full, write_whole

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb_run_id"

MetricRow = dict[str, float | None]


class MetricSink(Protocol):
    """Defines a place that metrics are written to."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes metrics of a step; metrics of an earlier call for the same step stay."""

    def close(self) -> None:
        """Writes what is pending."""


class RunLogger:
    """Writes named metrics of a run's steps to every sink that is on.

    Args:
        run_dir: The run's folder; made where it is missing.
        tensorboard: Whether to write TensorBoard events to `run_dir/tensorboard`.
        wandb: Arguments of `wandb.init` (project, name ...), or None for no wandb.
        recipe: The resolved recipe, which wandb shows as the run's config.
        resumed_step: The last step of the run that this one continues. Rows of later steps, which the continued run
            is about to write again, are dropped. None starts a new history.

    Raises:
        ValueError: `wandb` is given and the package wandb is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        tensorboard: bool,
        wandb: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        resumed_step: int | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._jsonl = JsonlSink(self.run_dir / METRICS_FILE, resumed_step)
        self._sinks: list[MetricSink] = [self._jsonl]
        self._text_sinks: list[TensorBoardSink] = []
        if tensorboard:
            folder = self.run_dir / TENSORBOARD_FOLDER
            is_new = not folder.is_dir() or not any(folder.iterdir())  # of a branch, or switched on by a resumed run
            sink = TensorBoardSink(folder, resumed_step)
            if resumed_step is not None and is_new:
                for row in read_metrics(self.run_dir / METRICS_FILE):
                    values = {name: math.nan if value is None else value for name, value in row.items()}
                    sink.write(_step_of(row), {name: value for name, value in values.items() if name != "step"})
            self._text_sinks.append(sink)
        self._sinks += self._text_sinks
        if wandb is not None:
            self._sinks.append(WandbSink(self.run_dir, wandb, recipe or {}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to a step's row; may be called more than once for the same step, never for an earlier one."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def log_text(self, step: int, name: str, markdown: str) -> None:
        """Writes a text of a step to TensorBoard, if that is on; the other sinks only take numbers."""
        for sink in self._text_sinks:
            sink.write_text(step, name, markdown)

    def sync(self) -> None:
        """Writes metrics.jsonl to the disk, so that it survives a power failure.

        Raises:
            DiskFullError: the file system only now says that there is no space.
        """
        self._jsonl.sync()

    @property
    def is_whole(self) -> bool:
        """Whether all logged metrics are in metrics.jsonl."""
        return self._jsonl.is_whole

    def close(self) -> None:
        """Closes every sink."""
        for sink in self._sinks:
            sink.close()


class JsonlSink:
    """Writes one JSON object per step, complete in the file after every write; non-finite numbers become null.

    When the disk is full, it keeps rows in memory and writes them as soon as there is space.

    Raises:
        DiskFullError: there is no space to rewrite the resumed run's history; the old file stays.
    """

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        rows = [] if resumed_step is None else [row for row in read_metrics(path) if _step_of(row) <= resumed_step]
        self._path = path
        self._row: MetricRow = rows.pop() if rows else {}
        rewritten = path.with_suffix(".partial")
        history = b"".join(map(_json_line, [*rows, self._row] if self._row else rows))
        try:
            rewritten.write_bytes(history)
        except OSError as error:
            rewritten.unlink(missing_ok=True)
            if is_disk_full(error):
                raise disk_full(path, error, len(history)) from error
            raise
        self._file = rewritten.open("r+b", buffering=0)
        self._row_start = len(history) - (len(_json_line(self._row)) if self._row else 0)
        self._kept = b""  # rows of earlier steps, from _row_start on, for which there was no space
        self.is_whole = True
        os.fsync(self._file.fileno())
        rewritten.replace(path)  # a run killed while it resumes keeps its history
        sync(path.parent)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Merges the metrics into the row of `step`."""
        if self._row and _step_of(self._row) != step:
            assert step > _step_of(self._row), f"metrics of step {step} after those of step {_step_of(self._row)}"
            self._end_row()
            self._row = {}
        self._row |= {"step": step} | {name: _json_number(value) for name, value in metrics.items()}
        self._write_row()

    def sync(self) -> None:
        """Calls fsync on the file.

        Raises:
            DiskFullError: the file system only now says that there is no space.
        """
        with translate_disk_full(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file, after a last attempt to write the rows kept in memory."""
        if not self.is_whole:
            self._write_row()
        if not self.is_whole:
            first = json.loads(self._kept.splitlines()[0])["step"] if self._kept else _step_of(self._row)
            logger.error(
                "Metrics of step %d to %d are lost: %s is on a full disk.", first, _step_of(self._row), self._path
            )
        self._file.close()

    def _end_row(self) -> None:
        line = _json_line(self._row)
        if self.is_whole:
            self._row_start += len(line)
        else:
            self._kept += line

    def _write_row(self) -> None:
        left = self._kept + _json_line(self._row)
        try:
            self._file.seek(self._row_start)
            while left:
                left = left[self._file.write(left) :]
            self._file.truncate()
        except OSError as error:
            if not is_disk_full(error):
                raise
            self._file.truncate(self._row_start)  # removes a partly written row
            if self.is_whole:
                logger.warning(
                    "%s. Metrics are kept in memory and written as soon as there is space.",
                    disk_full(self._path, error),
                )
            self.is_whole = False
            return
        self._row_start += len(self._kept)
        self._kept, self.is_whole = b"", True


class TensorBoardSink:
    """Writes scalars for TensorBoard; stops for good when the disk is full, as TensorBoard's writer does."""

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resumed_step is None else resumed_step + 1
        self._folder = folder
        self._has_ended = False
        self._step: int | None = None
        self._written: dict[str, float] = {}  # of this step, which is logged more than once
        with self._ending_where_full():
            self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one point to each metric's curve, unless the step has the same already."""
        if self._has_ended:
            return
        if step != self._step:
            self._step, self._written = step, {}
        new = {name: value for name, value in metrics.items() if self._written.get(name) != value}
        self._written |= new
        with self._ending_where_full():
            for name, value in new.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # otherwise a killed run loses up to two minutes of points

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Adds a text to TensorBoard."""
        if self._has_ended:
            return
        with self._ending_where_full():
            self._writer.add_text(name, markdown, step)
            self._writer.flush()

    def close(self) -> None:
        """Writes what is pending."""
        if self._has_ended:
            return
        with self._ending_where_full():
            self._writer.close()

    @contextmanager
    def _ending_where_full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not is_disk_full(error):
                raise
            self._has_ended = True
            logger.warning("%s. TensorBoard gets no more metrics of this run.", disk_full(self._folder, error))


class WandbSink:
    """Logs metrics to Weights & Biases, of all runs in a folder to one run there, whose id is in the folder.

    Steps that a resumed run makes again have the same metrics as before; wandb ignores them.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ValueError(
                "logger.wandb_enabled is true, but the package wandb is not installed: "
                "run `make setup EXTRAS=wandb`, or set logger.wandb_enabled=false"
            ) from error
        self._run = wandb.init(dir=str(run_dir), id=_wandb_id(run_dir), resume="allow", **settings)
        self._run.config.update(dict(recipe), allow_val_change=True)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics; wandb merges those of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the wandb run."""
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    """Returns the id of a folder's run in wandb: that of the environment, as in a sweep, or one kept in the folder."""
    if "WANDB_RUN_ID" in os.environ:
        return os.environ["WANDB_RUN_ID"]
    path = run_dir / WANDB_ID_FILE
    if not path.exists():
        with translate_disk_full(path):
            write_whole(path, secrets.token_hex(8))
    return path.read_text()


def read_metrics(path: Path) -> list[MetricRow]:
    """Reads a run's metrics.jsonl, one row a step; empty where there is no file.

    A last line that was not written to its end, as after a power failure, is left out with a warning.

    Raises:
        ValueError: Another line is not a JSON object with a step.
    """
    if not path.exists():
        return []
    rows: list[MetricRow] = []
    lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                logger.warning("%s:%d was not written to its end, and is left out.", path, number)
                break
            raise ValueError(f"{path}:{number} is not JSON: {error}; delete that line to go on") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}:{number} is not a row of metrics: a JSON object with an integer `step` is needed")
        rows.append(row)
    return rows


def _step_of(row: Mapping[str, float | None]) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step


def _json_number(value: float) -> float | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _json_line(row: Mapping[str, float | None]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"
