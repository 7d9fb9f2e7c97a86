"""Writes what a run's folder has of the run as a whole: its facts, and at its end the pictures and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from nemo_offload_rl.config import Recipe
from nemo_offload_rl.config.problems import show_file
from nemo_offload_rl.config.source.yaml_source import as_yaml
from nemo_offload_rl.metrics.logger import METRICS_FILE, read_metrics
from nemo_offload_rl.metrics.page import source_version, update_facts, write_page
from nemo_offload_rl.metrics.plot import plot_step
from nemo_offload_rl.metrics.report import plot_training
from nemo_offload_rl.plan.decisions import Resolved
from nemo_offload_rl.run.folder import LOG_FILE
from nemo_offload_rl.storage.disk import translate_disk_full


def write_start(run_dir: Path, algorithm: str, recipe: Recipe, resolved: Resolved) -> None:
    """Writes the facts of a run that begins; answers of an earlier command in the folder stay."""
    update_facts(
        run_dir,
        algorithm=algorithm,
        recipe=show_file(recipe.path),
        settings=recipe.own_settings(),
        config=as_yaml(dict(resolved.config)),
        version=source_version(),
        planned_peak_gib=resolved.peaks_gib,
        started=_now(),
        ended=None,
        ending=None,
    )


def write_end(run_dir: Path, ending: str) -> None:
    """Writes how a run has ended."""
    update_facts(run_dir, ending=ending, ended=_now())


def draw_results(run_dir: Path, algorithm: str, console: Console) -> dict[str, Path]:
    """Draws pictures and page of a run that has done a step; returns the run's files, by what they are."""
    places = {"metrics": run_dir / METRICS_FILE, "log": run_dir / LOG_FILE}
    if any(name.startswith("train/") for row in read_metrics(run_dir / METRICS_FILE) for name in row):
        drawings = {
            "curves": partial(plot_training, run_dir, algorithm),
            "timeline": partial(plot_step, run_dir),
            "report": partial(write_page, run_dir),  # last: it contains the pictures
        }
        places |= _draw(run_dir, drawings, console)
    return places


def _draw(run_dir: Path, drawings: Mapping[str, Callable[[], Path]], console: Console) -> dict[str, Path]:
    """Draws pictures and the page, and returns their files; tells the user of one that cannot be drawn."""
    drawn = {}
    for what, draw in drawings.items():
        try:
            with translate_disk_full(run_dir):
                drawn[what] = draw()
        except Exception as error:  # noqa: BLE001 - a run that has done its work does not fail for a picture
            tell(console, f"The {what} could not be drawn: {error}.")
    return drawn


def tell(console: Console, text: str, style: str | None = None) -> None:
    """Prints a line as it is written."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(" ", "seconds")
