"""Folders and files of a run."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.logging import RichHandler

from nemo_offload_rl.storage.disk import disk_full, is_disk_full, write_whole
from nemo_offload_rl.storage.manifest import DamagedError

RECIPE_FILE = "recipe.yaml"
LOG_FILE = "run.log"
HF_FOLDER = "hf"

_RUN = re.compile(r"exp_(\d+)")


def new_run_folder(log_dir: Path) -> Path:
    """Makes the next of exp_001, exp_002 ... under ``log_dir``, also where other runs do the same at once."""
    log_dir.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [int(match.group(1)) for path in log_dir.glob("exp_*") if (match := _RUN.fullmatch(path.name))]
        folder = log_dir / f"exp_{max(numbers, default=0) + 1:03d}"
        with suppress(FileExistsError):  # another run was faster
            folder.mkdir()
            return folder


def write_recipe(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a resolved recipe into a folder."""
    write_whole(folder / RECIPE_FILE, yaml.safe_dump(dict(config), sort_keys=False))


def read_recipe(folder: Path) -> dict[str, Any] | None:
    """The recipe that ``write_recipe`` has written, or None.

    Raises:
        DamagedError: it is there and is not what was written.
    """
    path = folder / RECIPE_FILE
    if not path.exists():
        return None
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DamagedError(f"{RECIPE_FILE} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise DamagedError(f"{RECIPE_FILE} is not what was written (no mapping)")
    return recipe


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the keys whose values differ, or which only one of two recipes has."""
    changed: list[str] = []
    for key in sorted({*old, *new}):
        if isinstance(old.get(key), Mapping) and isinstance(new.get(key), Mapping):
            changed += changed_keys(old[key], new[key], f"{prefix}{key}.")
        elif (key in old) != (key in new) or old[key] != new[key]:
            changed.append(f"{prefix}{key}")
    return changed


@contextmanager
def logged_to(folder: Path, console: Console) -> Iterator[None]:
    """Writes the package's log into the folder, and its warnings to the console too."""
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
    """The log, which ends where the disk is full: the user is told so once, and the run goes on.

    Args:
        path: of the file; lines are added.
        console: where the user is told.
    """

    def __init__(self, path: Path, console: Console) -> None:
        super().__init__(path)
        self._console = console
        self._is_behind = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Is called in an `except` of the handler's."""
        error = sys.exception()
        if not isinstance(error, OSError) or not is_disk_full(error):
            super().handleError(record)
        elif not self._is_behind:
            self._is_behind = True
            text = f"{disk_full(Path(self.baseFilename), error)}. The log is written on as soon as there is space."
            self._console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Close the file, whose last lines are lost where the disk is still full."""
        try:
            super().close()
        except OSError as error:
            if not is_disk_full(error):
                raise
