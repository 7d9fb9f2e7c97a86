"""Runs functions in their own processes: ranks, and trials that may run out of memory."""

import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing


def run_processes(function: Callable[..., Any], num_processes: int, *arguments: Any, timeout_s: float) -> list[Any]:
    """Calls `function(rank, *arguments)` in new processes.

    Args:
        function: of a module that can be imported.
        num_processes: how many.
        arguments: that can be pickled, like what is returned.
        timeout_s: after which all of them are killed.

    Returns:
        What each returned, in rank order.

    Raises:
        RuntimeError: one of them raised, with its traceback, or died.
        TimeoutError: they were not done in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(
            _child, (folder, function, arguments), nprocs=num_processes, join=False, start_method="spawn"
        )
        end = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    raise TimeoutError(f"{num_processes} processes were not done in {timeout_s:.0f} s")
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            raise RuntimeError(str(error)) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(num_processes)]


def _child(rank: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _result(folder, rank).write_bytes(pickle.dumps(function(rank, *arguments)))


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.pickle"
