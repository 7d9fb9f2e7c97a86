"""Makes and locks a run's folders, writes their recipe and log, and at the end the pictures and the page.

Imports neither torch nor Ray.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.logging import RichHandler

from nemo_offload_rl.config import Recipe, ValidatedRecipe, resolve_absent_keys
from nemo_offload_rl.config.problems import show_file
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.source.yaml_source import as_yaml
from nemo_offload_rl.metrics.logger import METRICS_FILE, read_metrics
from nemo_offload_rl.metrics.page import source_version, update_facts, write_page
from nemo_offload_rl.metrics.plot import plot_step
from nemo_offload_rl.metrics.report import plot_training
from nemo_offload_rl.plan.decisions import Resolved
from nemo_offload_rl.storage.disk import disk_full, is_disk_full, translate_disk_full, write_whole
from nemo_offload_rl.storage.lock import FolderLock
from nemo_offload_rl.storage.manifest import UnreadableError

RECIPE_FILE = "recipe.yaml"
LOG_FILE = "run.log"
HF_FOLDER = "hf"
PROFILE_FOLDER = "profile"

_RUN = re.compile(r"exp_(\d+)")


def new_run_folder(log_dir: Path) -> Path:
    """Makes the next of exp_001, exp_002 ... under ``log_dir``; safe against other runs that do so at the same time."""
    log_dir.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [int(match.group(1)) for path in log_dir.glob("exp_*") if (match := _RUN.fullmatch(path.name))]
        folder = log_dir / f"exp_{max(numbers, default=0) + 1:03d}"
        with suppress(FileExistsError):  # another run was faster
            folder.mkdir()
            return folder


def write_recipe(folder: Path, config: MasterConfig) -> None:
    """Writes a resolved recipe into a folder."""
    write_whole(folder / RECIPE_FILE, yaml.safe_dump(dict(config), sort_keys=False))


def read_recipe(folder: Path) -> MasterConfig | None:
    """Returns the recipe that ``write_recipe`` has written, or None where the folder has none.

    Raises:
        UnreadableError: the file is not a valid recipe.
    """
    path = folder / RECIPE_FILE
    if not path.exists():
        return None
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{RECIPE_FILE} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise UnreadableError(f"{RECIPE_FILE} is not what a run writes (no mapping)")
    resolve_absent_keys(recipe)  # an earlier version wrote fewer keys
    config: Any = recipe
    return config


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns the dotted names of the keys whose values differ, or that only one of two recipes has."""
    changed: list[str] = []
    for key in sorted({*old, *new}):
        if isinstance(old.get(key), Mapping) and isinstance(new.get(key), Mapping):
            changed += changed_keys(old[key], new[key], f"{prefix}{key}.")
        elif (key in old) != (key in new) or old[key] != new[key]:
            changed.append(f"{prefix}{key}")
    return changed


@contextmanager
def logged_to(folder: Path, console: Console) -> Iterator[None]:
    """Writes the package's log into the folder, and its warnings also to the console, inside the `with` block."""
    log = logging.getLogger("nemo_offload_rl")
    in_file = _LogFile(folder / LOG_FILE, console)
    in_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    on_console = RichHandler(logging.WARNING, console, show_time=False, show_path=False)
    handlers: tuple[logging.Handler, ...] = (in_file, on_console)
    previous_level, previous_propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
        log.setLevel(previous_level)
        log.propagate = previous_propagate


class _LogFile(logging.FileHandler):
    """Writes the log; when the disk is full, warns the user once and lets the run go on.

    Args:
        path: the file, to which lines are appended.
        console: where to print the warning.
    """

    def __init__(self, path: Path, console: Console) -> None:
        super().__init__(path)
        self._console = console
        self._has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Handles an error of `emit`, which calls this in its `except` block."""
        error = sys.exception()
        if not isinstance(error, OSError) or not is_disk_full(error):
            super().handleError(record)
        elif not self._has_warned:
            self._has_warned = True
            text = f"{disk_full(Path(self.baseFilename), error)}. Logging continues as soon as there is space."
            tell(self._console, text, style="yellow")

    def close(self) -> None:
        """Closes the file; if the disk is still full, its last lines are lost."""
        try:
            super().close()
        except OSError as error:
            if not is_disk_full(error):
                raise


def warm_start_folder(config: MasterConfig) -> Path:
    """Returns the folder in which a recipe's warm start runs."""
    return Path(config["logger"]["log_dir"]) / "warm_start"


@contextmanager
def lock_folders(recipe: ValidatedRecipe, console: Console) -> Iterator[Callable[[], None]]:
    """Locks the folders that a recipe names, for the duration of the `with` block.

    Yields:
        Releases the warm start's folder for other runs, once its model has been read; without one it does nothing.

    Raises:
        LockedError: another run holds one of them.
    """
    with ExitStack() as stack:
        if recipe.config["checkpointing"]["enabled"]:
            folder = Path(recipe.config["checkpointing"]["checkpoint_dir"])
            stack.enter_context(_locked(folder, "checkpointing.checkpoint_dir", console))
        of_warm_start = stack.enter_context(ExitStack())
        if recipe.warm_start is not None:
            folder = warm_start_folder(recipe.config)
            # The lock file is next to the folder, since `run_warm_start` may delete the folder.
            of_warm_start.enter_context(_locked(folder, "warm_start", console, is_beside=True))
        yield of_warm_start.close


def lock_run_folder(folder: Path, console: Console) -> FolderLock:
    """Returns a context that locks the folder of a run's metrics and log.

    Raises:
        LockedError: another run holds it.
    """
    return _locked(folder, "the run folder of these checkpoints", console)


def _locked(folder: Path, what: str, console: Console, *, is_beside: bool = False) -> FolderLock:
    return FolderLock(folder, what, partial(tell, console), is_beside=is_beside)


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
