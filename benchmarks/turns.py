"""Starts processes of a benchmark, and gives them turns: all import what they need at once, then each measures.

Imports take 25 s. In a run where other processes imported meanwhile, the CPU optimizer took longer for half of the
parameters than for all of them, which were measured last (docs/results/cpu_optimizer.md).
"""

import contextlib
import fcntl
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from nemo_offload_rl.mcore.model.bridge_import import auto_bridge

_LOCK = "BENCHMARK_TURN_LOCK"
_AT_ONCE = 10
_SLOW_IMPORTS = ("transformer_engine.pytorch", "nemo_offload_rl.worker.worker")


@contextlib.contextmanager
def my_turn(imports: Iterable[str] = ()) -> Iterator[None]:
    """Imports slow modules, then waits until no other process of the benchmark imports or measures.

    Args:
        imports: modules beside those that all benchmarks need; one that cannot be imported is left to its user.
    """
    with open(os.environ[_LOCK], "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # with all others that import
        for module in (*_SLOW_IMPORTS, *imports):
            with contextlib.suppress(ImportError):  # Transformer Engine is not on every machine
                importlib.import_module(module)
        auto_bridge()  # Megatron-Bridge, with a placeholder for Transformer Engine where that is absent
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def in_turn[Name, Row](run: Callable[[Name], Row], names: Sequence[Name]) -> Iterator[list[Row]]:
    """Yields all results of `run` so far whenever a process has ended, in the order of the names.

    Processes get their turn in any order.

    Args:
        run: starts a process, which calls `my_turn`, and waits for its end.
        names: what it is called with.
    """
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(_AT_ONCE) as threads:
        os.environ[_LOCK] = lock.name
        processes = [threads.submit(run, name) for name in names]
        for _ in as_completed(processes):
            yield [process.result() for process in processes if process.done()]


def run_children(
    script: str, options: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
) -> list[tuple[Any, int]]:
    """Runs a script in new processes at once, and waits for all of them.

    Args:
        script: the benchmark's own file.
        options: of each process, which also gets `--output FILE` and writes JSON there.
        environment: variables beside those of this process.

    Returns:
        What each wrote, None where it wrote nothing, and its exit status.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{number}.json" for number in range(len(options))]
        variables = {**os.environ, **(environment or {})}
        processes = [
            subprocess.Popen([sys.executable, script, *of_one, "--output", str(output)], env=variables)
            for of_one, output in zip(options, outputs, strict=True)
        ]
        statuses = [process.wait() for process in processes]
        found = [json.loads(output.read_text()) if output.exists() else None for output in outputs]
    return list(zip(found, statuses, strict=True))
