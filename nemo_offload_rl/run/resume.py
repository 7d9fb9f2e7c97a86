"""Chooses the checkpoint to resume from, and the run folder of the resumed run.

The checkpoint is the newest, or by ``checkpointing.on_damaged`` the newest undamaged one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.metrics.logger import METRICS_FILE
from nemo_offload_rl.run.checkpoints import STATE_FILE, Checkpoints, RunState, step_of
from nemo_offload_rl.run.folder import new_run_folder, read_recipe
from nemo_offload_rl.storage.disk import translate_disk_full
from nemo_offload_rl.storage.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    DamagedCheckpointError,
    DamagedError,
    UnreadableError,
    find_damage,
    read_manifest,
    show_damage,
)

OnDamaged = Literal["error", "previous"]


def choose(
    checkpoints: Checkpoints, on_damaged: OnDamaged, look: Callable[[Path], list[str]], say: Callable[[str], None]
) -> Path | None:
    """Returns the checkpoint to resume from.

    Args:
        checkpoints: the run's checkpoints.
        on_damaged: whether a damaged checkpoint is an error, or is set aside for the one before it.
        look: verifies a checkpoint and returns a line for each damaged file; raises UnreadableError if the checkpoint
            cannot be used for another reason.
        say: prints a line for the user.

    Returns:
        The newest undamaged checkpoint; None where there are no checkpoints.

    Raises:
        DamagedCheckpointError: the newest is damaged and that is an error, or all checkpoints are damaged.
        CheckpointError: the newest undamaged one cannot be used, or a file has the name of a checkpoint.
    """
    checkpoints.require_folders()
    damaged: list[tuple[Path, list[str]]] = []
    for checkpoint in checkpoints.newest_first():
        try:
            lines = look(checkpoint)
        except UnreadableError as error:
            raise CheckpointError(
                f"Checkpoint {checkpoint} cannot be resumed: {error}; move it to another folder to resume from the one "
                "before it, or to start from the beginning if there is none."
            ) from error
        if not lines:
            for other, found in damaged:
                aside = checkpoints.set_aside(other)
                say(f"{_says(other, found)}. It is kept as {aside}, and the run resumes from {checkpoint.name}.")
            return checkpoint
        damaged.append((checkpoint, lines))
        if on_damaged == "error":
            older = checkpoints.newest_first()[len(damaged) :]
            whole = next((other for other in older if _is_usable(other)), None)
            raise DamagedCheckpointError(f"{_says(checkpoint, lines)}. {_remedy(checkpoint, whole)}")
    if damaged:
        listed = "; ".join(_says(checkpoint, lines) for checkpoint, lines in damaged)
        raise DamagedCheckpointError(f"Every checkpoint is damaged: {listed}. {_remedy(damaged[0][0], None)}")
    return None


def damage_seen_by_driver(checkpoint: Path) -> list[str]:
    """Checks the sizes of a checkpoint's files and the contents of the driver's own; returns a line per damaged file.

    Raises:
        UnreadableError: its files are as they were written, but it cannot be used.
    """
    if not any((checkpoint / name).exists() for name in (MANIFEST_FILE, STATE_FILE)):
        raise UnreadableError(f"{STATE_FILE} is missing")  # a folder of another program, not a damaged checkpoint
    try:
        manifest = read_manifest(checkpoint)
    except DamagedError as error:
        return [str(error)]
    if lines := manifest.wrong_sizes(checkpoint) or find_damage(checkpoint, manifest.of_driver()):
        return lines
    read_recipe(checkpoint)
    step = RunState.read(checkpoint).step
    if step != step_of(checkpoint):  # the run would fail at the step of the name, whose folder exists
        raise UnreadableError(f"its {STATE_FILE} is of step {step}")
    return []


def _is_usable(checkpoint: Path) -> bool:
    try:
        return not damage_seen_by_driver(checkpoint)
    except UnreadableError:
        return False


def run_folder_of(checkpoint: Path, config: MasterConfig) -> Path | None:
    """Returns the run folder in which a checkpoint's run continues; None for a branch, which has a folder of its own.

    The resumed run is a branch if the recipe's `logger.log_dir` is another, or if the checkpoint is a copy: its run has
    written it to another `checkpointing.checkpoint_dir`, which still has checkpoints.

    Args:
        checkpoint: the checkpoint to resume from.
        config: the resolved recipe of the resumed run.
    """
    run_dir, recipe = Path(RunState.read(checkpoint).run_dir), read_recipe(checkpoint)
    if run_dir.parent.resolve() != Path(config["logger"]["log_dir"]).resolve():
        return None
    written_to = checkpoint.parent if recipe is None else Path(recipe["checkpointing"]["checkpoint_dir"])
    is_copy = written_to.resolve() != checkpoint.parent.resolve() and any(written_to.glob("step_*"))
    return None if is_copy else run_dir


def branch_run_folder(checkpoint: Path, log_dir: Path, say: Callable[[str], None]) -> Path:
    """Makes a new run folder under `log_dir` that has the metrics of the checkpoint's run.

    Args:
        checkpoint: the checkpoint to resume from.
        log_dir: the folder of the run folders.
        say: prints a line for the user.

    Raises:
        DiskFullError: there is no space for the metrics.
    """
    folder, original = new_run_folder(log_dir), Path(RunState.read(checkpoint).run_dir)
    if (original / METRICS_FILE).is_file():
        with translate_disk_full(folder):
            shutil.copyfile(original / METRICS_FILE, folder / METRICS_FILE)
        say(f"The run folder is {folder}, and {original} stays as it is: this is a branch of that run.")
    else:
        say(
            f"The run folder is {folder}, without the metrics so far: there is no {original.absolute() / METRICS_FILE}."
            " A run goes on in its folder if the command is started where it was the first time, with the same paths."
        )
    return folder


def _says(checkpoint: Path, lines: Sequence[str]) -> str:
    return f"Checkpoint {checkpoint} is damaged: {show_damage(lines)}"


def _remedy(checkpoint: Path, older: Path | None) -> str:
    if older is None:
        return (
            "No older checkpoint can be used: start from the beginning with another checkpointing.checkpoint_dir, or "
            f"remove {checkpoint}."
        )
    return (
        f"To resume from the one before it, {older.name}, run the same command with "
        "++checkpointing.on_damaged=previous."
    )
