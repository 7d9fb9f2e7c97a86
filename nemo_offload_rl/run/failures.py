"""Says whether a failed run starts again, and prints what failed, why, and what to do."""

from __future__ import annotations

from pathlib import Path

import torch
from ray.exceptions import OutOfMemoryError, RayError

from nemo_offload_rl.generation.interface import GenerationError
from nemo_offload_rl.placement.nodes import NodeLostError
from nemo_offload_rl.refit.loads import EngineLostError
from nemo_offload_rl.run.interrupt import Progress
from nemo_offload_rl.worker.errors import WorkerError

NODE_REPLACEMENT_S = 900.0
"""How long a restart waits for the nodes that the recipe asks for: a scheduler may have to bring a new one up."""
_NODE_HAS_DIED = "its node has died"  # in the text of Ray's error, which has no type of its own for this


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


def add_failure_summary(error: WorkerError | GenerationError, logs_folder: Path | None) -> None:
    """Adds the summary to another process's error as a note, which Python prints below Ray's own text.

    Args:
        error: the error of the process.
        logs_folder: the folder with the output of all processes; None where it is in Ray's session folders on the
            nodes.
    """
    place = logs_folder or "Ray's session folder on their node (/tmp/ray/session_latest/logs, unless Ray has another)"
    error.add_note(f"The output of the workers is in {place}.")
    error.add_note(f"The run failed: {_who(error)} failed in {error.verb}: {_reason(error.cause)}")


def gcs_failure(address: str, progress: Progress) -> str:
    """Returns what to say when Ray's GCS is gone, with what is lost and where the run goes on."""
    return (
        f"The run failed: Ray's GCS, its central process (gcs_server at {address}), has ended or cannot be reached: it "
        "was killed (by the kernel, if the host ran out of memory, which dmesg then shows; by a scheduler; by a user), "
        "or its machine or the network has failed. Without it Ray ends the processes of all ranks and engines. "
        f"{progress}"
    )


def _who(error: WorkerError | GenerationError) -> str:
    if isinstance(error, WorkerError):
        where = "" if error.node is None else f", on node {error.node},"
        return f"rank {error.rank} of the policy{where}"
    if error.place is None:
        return "generation"
    rank, node = error.place
    return f"generation{'' if rank is None else f' beside rank {rank}'}, on node {node},"


def _reason(cause: BaseException) -> str:
    if isinstance(cause, OutOfMemoryError):
        return (
            "Ray killed its process, since the host ran short of memory; give the run more host memory, or offload "
            "less to it (nemo-offload-rl plan shows what takes host memory)."
        )
    if isinstance(cause, EngineLostError):  # the rank that sent it weights has only said so
        return str(cause).splitlines()[0]
    if isinstance(cause, NodeLostError):
        return f"{cause}: its machine, its network or its Ray process has failed."
    if isinstance(cause, RayError) and _NODE_HAS_DIED in str(cause):
        return "its node has died: the machine, its network or its Ray process has failed."
    if isinstance(cause, RayError):
        return (
            "its process ended without an error of its own: it was killed (by the kernel, if the host ran out of "
            "memory, which dmesg then shows; by a scheduler; by a user) or it crashed in a library."
        )
    text = str(cause).strip()
    named = f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__
    if isinstance(cause, torch.OutOfMemoryError):
        return (
            f"{named} Lower policy.train_micro_batch_size, policy.logprob_batch_size or policy.generation_batch_size "
            "(with vLLM: policy.generation.vllm_kwargs.max_num_seqs), or offload more (nemo-offload-rl plan shows what "
            "takes GPU memory); if vLLM stays awake, set policy.residency.generation_weights=discard, and if vLLM was "
            "built at the same time as the policy, set policy.generation.vllm_cfg.build_beside_policy=false."
        )
    return named
