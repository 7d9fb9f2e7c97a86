"""Passes on why a setting could not be measured, in one line, from its process to the one that started it."""

import dataclasses
import json
from pathlib import Path

import torch
from ray.exceptions import RayError

from colocated_ways.measured import Measured
from nemo_offload_rl.config import RecipeError
from nemo_offload_rl.generation.interface import GenerationError
from nemo_offload_rl.worker.errors import WorkerError

REFUSALS = (ValueError, torch.OutOfMemoryError, WorkerError, GenerationError, RayError)
"""What a run raises where a recipe is refused, memory runs out, or a process of its own fails."""


class RefusedError(RuntimeError):
    """Says that a setting was not measured; `str()` is the reason, one line."""


def reason(error: BaseException) -> str:
    """Returns the line that names the first cause, without tracebacks.

    Args:
        error: of the driver; that of a rank or an engine has its `cause`.
    """
    cause = error
    while isinstance(inner := getattr(cause, "cause", None), BaseException):
        cause = inner
    if isinstance(cause, RecipeError):  # its first line only counts the problems
        return "; ".join(str(problem) for problem in cause.problems)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if not lines:
        return type(cause).__name__
    # Ray's text is a traceback, or ends with how a process died; other errors go on with tables and advice.
    return f"{type(cause).__name__}: {lines[-1] if isinstance(cause, RayError) else lines[0]}"


def write_measured(path: Path, measured: Measured) -> None:
    """Writes what a setting gave."""
    path.write_text(json.dumps({"measured": dataclasses.asdict(measured)}))


def write_refusal(path: Path, why: str) -> None:
    """Writes why a setting gave nothing."""
    path.write_text(json.dumps({"refused": why}))


def read_measured(path: Path, exit_status: int) -> Measured:
    """Reads what the process of a setting wrote.

    Args:
        path: the file; it is not there where the process was killed, or failed in a way of its own.
        exit_status: of the process.

    Raises:
        RefusedError: it could not measure the setting.
    """
    if not path.exists():
        raise RefusedError(f"its process ended with status {exit_status}")
    written = json.loads(path.read_text())
    if "refused" in written:
        raise RefusedError(written["refused"])
    return Measured(**written["measured"])
