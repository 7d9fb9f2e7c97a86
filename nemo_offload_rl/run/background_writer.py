"""Writes the policy's part of a checkpoint in the background, while training goes on."""

from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_offload_rl.run.algorithm import Algorithm
from nemo_offload_rl.storage.checksum import FileSum


class WriteBesideRun:
    """Takes a snapshot of the policy, which ranks write while training goes on; see `CheckpointWriter`.

    Args:
        algorithm: the algorithm whose policy is saved.
        write_beside_policy: writes the other files of a checkpoint, none of which changes during a run.
    """

    def __init__(self, algorithm: Algorithm, write_beside_policy: Callable[[Path], None]) -> None:
        self._algorithm = algorithm
        self._write_beside_policy = write_beside_policy

    def start(self, folder: Path) -> None:
        """Takes a snapshot of the policy's state."""
        self._algorithm.start_save(folder)

    def is_written(self) -> bool:
        """Returns whether all ranks have written their files."""
        return self._algorithm.is_save_written()

    def finish(self, folder: Path) -> Mapping[str, FileSum]:
        """Waits for the ranks to write their files, then writes the other files of the checkpoint."""
        files = self._algorithm.finish_save()
        self._write_beside_policy(folder)
        return files
