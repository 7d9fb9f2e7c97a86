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
        at_most: the most restarts that are allowed.

    Attributes:
        at_most: the most restarts that are allowed.
        num_done: restarts so far.
        need_gpus: whether the run has begun on GPUs, so that a restart does not fall back to the CPU without them.
    """

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most
        self.num_done = 0
        self.need_gpus = False

    def take(self, error: WorkerError | GenerationError) -> bool:
        """Returns whether the run may start again after this error, and counts the restart.

        It may after the loss of a process or node. An exception in a process would be raised again, and an
        out-of-memory kill would happen again, so these do not restart the run.
        """
        is_loss = isinstance(error.cause, RayError) and not isinstance(error.cause, OutOfMemoryError)
        if not is_loss or self.num_done == self.at_most:
            return False
        self.num_done += 1
        return True

    def __str__(self) -> str:
        return f"Restart {self.num_done} of at most {self.at_most} (cluster.max_restarts)"
