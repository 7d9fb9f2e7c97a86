"""Checks whether the resources that a run's processes hold grow over many cycles."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch

from colocated_ways.cycles import Cycles
from nemo_offload_rl.memory.units import GIB

# Quantities of `memory_stats` that must not grow, by their names here.
_OF_GPU = {
    "gpu_reserved_gib": "reserved GPU GiB",  # of a sleeping vLLM, without released memory
    "gpu_driver_gib": "used GPU GiB, by the driver",
    "gpu_context_gib": "GPU GiB of context, kernels and NCCL",
    "gpu_pools_gib": "GPU GiB of vLLM's pools",
    "host_pools_gib": "host GiB of vLLM's pools",
}

# Tolerated growth from the median of the first tenth of the cycles to that of the last, by the end of the name.
# Streams and IPC handles show as file descriptors and mappings; host memory grows with gaps between its blocks.
_TOLERANCES = (
    ("threads", 0.0), ("file descriptors", 0.0), ("memory mappings", 64.0), ("host memory GiB", 0.5), ("", 0.25),
)  # fmt: skip


class Holdings:
    """Reads what the processes of a run hold.

    Args:
        cycles: whose.
    """

    def __init__(self, cycles: Cycles) -> None:
        self._cycles = cycles
        self._processes = cycles.processes()

    def read(self) -> dict[str, float]:
        """Returns quantities by name; those of the GPU only where there is one."""
        values: dict[str, float] = {}
        stats = {"policy": self._cycles.policy.memory_stats(), "engine": self._cycles.generation.memory_stats()}
        for owner, process in self._processes.items():
            values[f"{owner}: threads"] = process.num_threads()
            values[f"{owner}: file descriptors"] = process.num_fds()
            values[f"{owner}: memory mappings"] = _num_mappings(process)
            values[f"{owner}: host memory GiB"] = stats[owner]["host_rss_gib"]
            for name, called in _OF_GPU.items():
                if name in stats[owner]:
                    values[f"{owner}: {called}"] = stats[owner][name]
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            values["GPU: used GiB, by the driver"] = (total - free) / GIB
        return values


def _num_mappings(process: psutil.Process) -> int:
    return len(Path(f"/proc/{process.pid}/maps").read_text().splitlines())


def flatness(readings: Sequence[Mapping[str, float]]) -> list[tuple[str, float, str]]:
    """Computes first, last and largest value and growth of each quantity, and whether it stays within its tolerance.

    Args:
        readings: of the cycles that count, the earliest first.

    Returns:
        (metric, value, unit); "NAME, flat" is True or False.
    """
    figures: list[tuple[str, float, str]] = []
    for name in readings[0]:
        values = [reading[name] for reading in readings if name in reading]
        tenth = max(1, len(values) // 10)
        growth = statistics.median(values[-tenth:]) - statistics.median(values[:tenth])
        tolerance = next(most for ending, most in _TOLERANCES if name.endswith(ending))
        figures += [
            (f"{name}, first", values[0], ""),
            (f"{name}, last", values[-1], ""),
            (f"{name}, largest", max(values), ""),
            (f"{name}, growth", growth, ""),
            (f"{name}, flat", growth <= tolerance, ""),
        ]
    return figures
