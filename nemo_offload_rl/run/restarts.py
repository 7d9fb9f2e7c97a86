"""Starts a run again after the loss of a process or a node, as often as cluster.max_restarts says."""

from __future__ import annotations

from ray.exceptions import OutOfMemoryError, RayError

from nemo_offload_rl.generation.interface import GenerationError
from nemo_offload_rl.worker.errors import WorkerError

NODE_REPLACEMENT_S = 900.0
"""How long a restart waits for the nodes that the recipe asks for: a scheduler may have to bring a new one up."""


class Restarts:
    """Counts the restarts of a command.

    Args:
        at_most: how many there may be.

    Attributes:
        at_most: how many restarts there may be.
        num_done: restarts so far.
    """

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most
        self.num_done = 0

    def take(self, error: WorkerError | GenerationError) -> bool:
        """Returns whether the run starts again after this error; counts it.

        A process that has ended without an error of its own may not do so again; an error would be raised again, and
        the host's memory would run short again.
        """
        is_loss = isinstance(error.cause, RayError) and not isinstance(error.cause, OutOfMemoryError)
        if not is_loss or self.num_done == self.at_most:
            return False
        self.num_done += 1
        return True

    def __str__(self) -> str:
        return f"Restart {self.num_done} of at most {self.at_most} (cluster.max_restarts)"
