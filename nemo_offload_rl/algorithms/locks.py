"""The folders that one run at a time may have: checkpoints, run folder, warm start. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_offload_rl.config import ValidatedRecipe
from nemo_offload_rl.storage.lock import FolderLock


def warm_start_folder(config: Mapping[str, Any]) -> Path:
    """Where a recipe's warm start is run and kept."""
    return Path(config["logger"]["log_dir"]) / "warm_start"


@dataclass(frozen=True)
class Locks:
    """The locks of a command.

    Attributes:
        warm_start: holds the warm start's lock; empty where there is no warm start.
    """

    warm_start: ExitStack = field(default_factory=ExitStack)

    def release_warm_start(self) -> None:
        """Lets other runs have the warm start's folder, once its model has been read."""
        self.warm_start.close()


@contextmanager
def lock_folders(recipe: ValidatedRecipe, console: Console) -> Iterator[Locks]:
    """Locks the folders that a recipe names, for as long as it is entered.

    Raises:
        LockedError: another run has one of them.
    """
    with ExitStack() as stack:
        if recipe.config["checkpointing"]["enabled"]:
            folder = Path(recipe.config["checkpointing"]["checkpoint_dir"])
            stack.enter_context(_locked(folder, "checkpointing.checkpoint_dir", console))
        locks = Locks(stack.enter_context(ExitStack()))
        if recipe.warm_start is not None:
            folder = warm_start_folder(recipe.config)
            # Beside it: the folder of another warm start is removed.
            locks.warm_start.enter_context(_locked(folder, "warm_start", console, is_beside=True))
        yield locks


@contextmanager
def lock_run_folder(folder: Path, console: Console) -> Iterator[None]:
    """Locks the folder of a run's metrics and log.

    Raises:
        LockedError: another run has it.
    """
    with _locked(folder, "the run folder of these checkpoints", console):
        yield


@contextmanager
def _locked(folder: Path, what: str, console: Console, *, is_beside: bool = False) -> Iterator[None]:
    with FolderLock(folder, what, is_beside=is_beside) as lock:
        if lock.notice is not None:
            console.print(lock.notice, markup=False, highlight=False, soft_wrap=True)
        yield
