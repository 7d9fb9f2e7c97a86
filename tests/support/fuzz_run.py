"""Runs fuzz cases in one child process. `python -m support.fuzz_run 7 120 121` repeats case 120 of seed 7.

A case passes if it is refused with a message, or accepted with every property held. It fails with another exception,
more than 10 s of CPU time, more than 1 GiB beyond what is imported, the death of the process, or a broken property.
"""

import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from support import fuzz_data
from support.ranks import run_ranks

MAX_CPU_S = 10
MAX_BYTES = 2**30


class _TooSlowError(BaseException):
    """Interrupts a slow case; not an Exception, so that the tested code does not catch it as one of its own."""


@dataclass
class Report:
    accepted: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def __str__(self) -> str:
        told = f"{self.accepted} accepted, {self.refused} refused, {len(self.failures)} failed"
        return "\n\n".join([f"{told}; slowest case {self.slowest_s:.1f} s of CPU time", *self.failures])


def run_cases(seed: int, num_cases: int, timeout_s: float = 600) -> Report:
    """Runs cases 0 to num_cases - 1 of a seed; the error of a case that ends or stops its process names it."""
    with tempfile.TemporaryDirectory() as name:
        try:
            [report] = run_ranks(partial(_child, Path(name), seed, 0, num_cases), 1, num_ports=0, timeout_s=timeout_s)
        except AssertionError as error:
            error.add_note(f"case {max(map(_number, Path(name).glob('case_*')), default=None)} of seed {seed}")
            raise
    return report


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("case_"))


def _stop_case(number: int, frame: object) -> None:
    raise _TooSlowError


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES, resource.RLIM_INFINITY))


def _child(folder: Path, seed: int, first: int, stop: int, *_rank: object) -> Report:
    os.environ["HF_HUB_OFFLINE"] = "1"
    report = Report()
    fuzz_data.prepare(folder)
    signal.signal(signal.SIGPROF, _stop_case)
    _limit_memory()
    for case in range(first, stop):
        own = folder / f"case_{case}"
        own.mkdir()
        os.chdir(own)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        try:
            if fuzz_data.run_case(random.Random(f"data {seed} {case}"), own):
                report.accepted += 1
            else:
                report.refused += 1
        except (Exception, _TooSlowError):  # noqa: BLE001  # any unexpected exception is a finding
            report.failures.append(f"case {case} of seed {seed}: {traceback.format_exc()[-6000:]}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        report.slowest_s = max(report.slowest_s, time.process_time() - start)
    return report


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(f"{_child(Path(name), *map(int, sys.argv[1:4]))}\n")
