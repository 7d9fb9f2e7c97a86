"""Runs torch_memory_saver in a child process for each way, because it hooks into a process by LD_PRELOAD."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from offload_ways.trips import Trip

WAYS: Mapping[str, Mapping[str, str]] = {
    "torch_memory_saver": {},
    "torch_memory_saver_retained": {"TMS_RETAIN_CPU_BACKUP": "1"},
}
_CHILD = Path(__file__).parent / "memory_saver_child.py"
_TIMEOUT_S = 120
_ENVIRONMENT_LOCK = threading.Lock()


@dataclass(frozen=True)
class Job:
    """Describes tensors to move, and how often."""

    case: str
    way: str
    sizes: Sequence[int]
    """fp32 elements of each tensor."""
    rounds: int
    warmups: int


def preloading(way: str) -> Mapping[str, str]:
    """Returns the environment of a process that runs a way; torch_memory_saver's own names its library there.

    Raises:
        ImportError: torch_memory_saver is the way, and not installed.
    """
    if way not in WAYS:
        return {}
    import torch_memory_saver

    with (
        _ENVIRONMENT_LOCK,
        torch_memory_saver.configure_subprocess(),
    ):  # it changes our environment while it lasts
        return os.environ | WAYS[way] | {"LD_LIBRARY_PATH": _library_path()}


def run(way: str, jobs: Sequence[Job]) -> dict[str, list[Trip]]:
    """Returns the round trips of each job of one way, by case, from a child process.

    Raises:
        ImportError: torch_memory_saver is not installed.
        RuntimeError: the child failed, or gave no memory back.
        subprocess.TimeoutExpired: it took too long.
    """
    done = subprocess.run(
        [sys.executable, str(_CHILD)],
        input=json.dumps([asdict(job) for job in jobs]),
        env=os.environ | preloading(way),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"its process ended with status {done.returncode}: {done.stderr.strip()[-400:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    by_case = {case: [Trip(**trip) for trip in trips] for case, trips in found.items()}
    for job in jobs:
        if min(trip.released_bytes for trip in by_case[job.case]) < 2 * sum(job.sizes):  # half of 4 bytes an element
            raise RuntimeError(f"{job.case}: its pause gave next to nothing back; is its library preloaded?")
    return by_case


def _library_path() -> str:
    """Returns LD_LIBRARY_PATH with the folder of torch's CUDA runtime, which a preloaded library needs first."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    folders = {str(Path(line.split()[-1]).parent) for line in maps if "libcudart" in line}
    return ":".join([*sorted(folders), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]).strip(":")
