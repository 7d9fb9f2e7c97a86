"""Tests which memory the driver counts for a process, with a replacement of NVML."""

from types import SimpleNamespace

import pytest
import torch

from nemo_offload_rl.metrics.memory import largest_of, process_gpu_bytes


class Nvml:
    class NVMLError(Exception):
        pass

    def __init__(self, *processes, fails=False):
        self.processes = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]
        self.fails = fails

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-abc"
        return "gpu"

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        if self.fails:
            raise self.NVMLError("not permitted")
        return self.processes


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="abc"))


@pytest.mark.parametrize(
    ("nvml", "found"),
    [(Nvml((6, 5), (7, 9)), 9), (Nvml((6, 5)), None), (Nvml((7, None)), None), (Nvml((7, 9), fails=True), None)],
    ids=["its own", "other numbers in a container", "not counted", "not told"],
)
def test_it_is_this_process_that_counts(nvml, found):
    assert process_gpu_bytes(nvml, pid=7) == found


def test_the_largest_of_processes_that_tell_differently_much():
    assert largest_of([{"a": 1.0, "b": 3.0}, {"a": 2.0}]) == {"a": 2.0, "b": 3.0}
