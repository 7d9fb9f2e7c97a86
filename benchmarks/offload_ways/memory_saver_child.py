"""Runs as the child of memory_saver.py: reads jobs from its input and prints their round trips as the last line."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch_memory_saver import torch_memory_saver

from offload_ways.trips import round_trips


class MemorySaver:
    """Pauses and resumes the allocations that were made in a region."""

    name = "torch_memory_saver"

    def __init__(self, tag: str, sizes: Sequence[int]) -> None:
        self._tag = tag
        with torch_memory_saver.region(tag=tag, enable_cpu_backup=True):
            self.tensors = [torch.empty(size, device="cuda") for size in sizes]
        for tensor in self.tensors:
            tensor.normal_()
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)

    def leave(self) -> None:
        """See `Way`."""
        torch_memory_saver.pause(self._tag)

    def come_back(self) -> None:
        """See `Way`."""
        torch_memory_saver.resume(self._tag)

    def close(self) -> None:
        """See `Way`."""
        self.tensors = []


def main() -> None:
    device = torch.device("cuda", 0)
    found = {}
    for job in json.load(sys.stdin):
        way = MemorySaver(job["case"], job["sizes"])
        trips = round_trips(way, way.tensors, device, rounds=job["rounds"], warmups=job["warmups"])
        found[job["case"]] = [asdict(trip) for trip in trips]
        way.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
