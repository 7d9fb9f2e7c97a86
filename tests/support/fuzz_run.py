"""Runs fuzz cases in one child process. `python -m support.fuzz_run data 7 120 121` repeats case 120 of seed 7.

A case passes if it is refused with a message, or accepted with every property held. It fails with another exception,
more than 10 s of CPU time, more than 1 GiB beyond what is imported, the death of the process, or a broken property.
"""

import importlib
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_CPU_S = 10
MAX_SILENT_S = 120  # wall time, for a case that waits instead of computing; other work may use the cores
MAX_BYTES = 2**30

# For each kind the module with `prepare(folder)` and `run_case(rng, folder)`, which returns whether it was accepted.
KINDS = {"data": "support.fuzz_data", "self": "support.fuzz_self"}

RunCase = Callable[[random.Random, Path], bool]


class PropertyError(AssertionError):
    """Reports a property that does not hold for an accepted case."""


class _TooSlowError(BaseException):
    """Interrupts a slow case; not an Exception, so that the tested code does not catch it as one of its own."""


@dataclass
class Report:
    accepted: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    peak_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.accepted} accepted, {self.refused} refused, {len(self.failures)} failed; slowest case "
            f"{self.slowest_s:.1f} s of CPU time, peak {self.peak_bytes / 2**20:.0f} MiB"
        )


def run_cases(kind: str, seed: int, num_cases: int) -> Report:
    """Runs cases 0 to num_cases - 1 of a seed; if a case kills its process, it fails and a new one runs the rest."""
    report = Report()
    first = 0
    while first < num_cases:
        first = _run_child(kind, seed, first, num_cases, report)
    return report


def _run_child(kind: str, seed: int, first: int, stop: int, report: Report) -> int:
    """Adds a child's results to the report; returns the first case that is still to run."""
    command = [sys.executable, "-m", "support.fuzz_run", kind, str(seed), str(first), str(stop)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as child,
    ):
        case, is_ready = first - 1, False
        for line in _lines(child):
            said = json.loads(line)
            case = said["case"]
            is_ready = True
            if said["ready"]:
                continue
            report.peak_bytes = max(report.peak_bytes, said["peak_bytes"])
            report.slowest_s = max(report.slowest_s, said["seconds"])
            if said["failure"]:
                report.failures.append(f"case {said['case']} of seed {seed}: {said['failure']}")
            elif said["accepted"]:
                report.accepted += 1
            else:
                report.refused += 1
        case += 1
        if case < stop:
            child.kill()
            child.wait()
            errors.seek(0)
            if not is_ready:
                raise RuntimeError(f"{' '.join(command)} did not start: {errors.read()[-3000:]}")
            what = f"the process ended ({child.returncode}), or said nothing for {MAX_SILENT_S} s"
            report.failures.append(f"case {case} of seed {seed}: {what}: {errors.read()[-3000:]}")
            return case + 1
    return stop


def _lines(child: "subprocess.Popen[str]") -> Iterator[str]:
    assert child.stdout is not None
    while select.select([child.stdout], [], [], MAX_SILENT_S)[0]:
        line = child.stdout.readline()
        if not line:
            return
        yield line


def _stop_case(number: int, frame: object) -> None:
    raise _TooSlowError


def _one_case(run_case: RunCase, rng: random.Random, folder: Path, max_cpu_s: float) -> dict[str, Any]:
    start = time.process_time()
    accepted, failure = False, ""
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    try:
        accepted = run_case(rng, folder)
    except (Exception, _TooSlowError):  # noqa: BLE001  # any unexpected exception is a finding
        failure = traceback.format_exc()[-6000:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"accepted": accepted, "failure": failure, "seconds": time.process_time() - start}


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES, resource.RLIM_INFINITY))


def _child(kind: str, seed: int, first: int, stop: int) -> None:
    module = importlib.import_module(KINDS[kind])
    max_cpu_s = 1 if kind == "self" else MAX_CPU_S
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps prints of the tested code out of the results
    with tempfile.TemporaryDirectory() as name:
        module.prepare(Path(name))
        signal.signal(signal.SIGPROF, _stop_case)
        _limit_memory()
        answers.write(json.dumps({"case": first - 1, "ready": True, "peak_bytes": 0, "seconds": 0}) + "\n")
        for case in range(first, stop):
            folder = Path(name) / f"case_{case}"
            folder.mkdir()
            os.chdir(folder)
            result = _one_case(module.run_case, random.Random(f"{kind} {seed} {case}"), folder, max_cpu_s)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            answers.write(json.dumps({"case": case, "ready": False, "peak_bytes": peak, **result}) + "\n")


if __name__ == "__main__":
    _child(sys.argv[1], *map(int, sys.argv[2:5]))
