"""The last line that a failed run prints: what failed, why, and what to do, where Ray's own text would stand last."""

from __future__ import annotations

import torch
from ray.exceptions import OutOfMemoryError, RayError

from nemo_offload_rl.generation.interface import GenerationError
from nemo_offload_rl.worker.group import WorkerError


def add_failure_summary(error: WorkerError | GenerationError) -> None:
    """Adds the line to an error of another process as a note, which Python prints below the error's own text."""
    who = f"rank {error.rank} of the policy" if isinstance(error, WorkerError) else "generation"
    error.add_note(f"The run failed: {who} failed in {error.verb}: {_reason(error.cause)}")


def _reason(cause: BaseException) -> str:
    if isinstance(cause, OutOfMemoryError):
        return (
            "Ray ended its process, since the host's memory ran short; give the run more memory, or let it hold less "
            "there (nemo-offload-rl plan shows what it holds)."
        )
    if isinstance(cause, RayError):
        return (
            "its process ended without an error of its own: it was killed (by the kernel where the host's memory runs "
            "short, as dmesg then says; by a scheduler; by a user) or it crashed in a library."
        )
    text = str(cause).strip()
    named = f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__
    if isinstance(cause, torch.OutOfMemoryError):
        return (
            f"{named} Lower policy.train_micro_batch_size, policy.logprob_batch_size or policy.generation_batch_size, "
            "or offload more (nemo-offload-rl plan shows what lies where)."
        )
    return named
