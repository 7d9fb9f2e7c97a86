"""Has the policy's part of a checkpoint written while the run goes on."""

from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_offload_rl.run.algorithm import Algorithm
from nemo_offload_rl.storage.checksum import FileSum


class WriteBesideRun:
    """Takes the policy's state at once, and has the ranks write it beside what follows; see `CheckpointWriter`.

    Args:
        algorithm: the algorithm whose policy is saved.
        write_beside_policy: writes what else a checkpoint has, none of which changes in a run.
    """

    def __init__(self, algorithm: Algorithm, write_beside_policy: Callable[[Path], None]) -> None:
        self._algorithm = algorithm
        self._write_beside_policy = write_beside_policy

    def start(self, folder: Path) -> None:
        """Takes the policy's state of now."""
        self._algorithm.start_save(folder)

    def is_written(self) -> bool:
        """Returns whether all ranks have written their files."""
        return self._algorithm.is_save_written()

    def finish(self, folder: Path) -> Mapping[str, FileSum]:
        """Waits for the ranks, and writes the rest."""
        files = self._algorithm.finish_save()
        self._write_beside_policy(folder)
        return files
