from types import SimpleNamespace

import pytest
import torch

from nemo_offload_rl.metrics.memory import graph_pool_bytes, largest_of, memory_stats, process_gpu_bytes, reset_gpu_peak


def test_host_memory_grows_with_what_is_held():
    before = memory_stats()["host_rss_gib"]
    held = torch.ones(64 * 1024**2, dtype=torch.uint8)  # written to, so resident
    assert memory_stats()["host_rss_gib"] - before > 0.05
    assert held.sum() > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a process without a GPU")
def test_without_a_gpu_there_is_only_host_memory():
    reset_gpu_peak()
    assert list(memory_stats()) == ["host_rss_gib"]
    assert graph_pool_bytes() == 0


@pytest.mark.gpu
def test_gpu_peak_starts_anew():
    big = torch.ones(256 * 1024**2, dtype=torch.uint8, device="cuda")
    assert memory_stats()["gpu_peak_allocated_gib"] >= 0.25
    del big
    reset_gpu_peak()
    stats = memory_stats()
    assert stats["gpu_peak_allocated_gib"] < 0.25
    assert stats["gpu_peak_allocated_gib"] == pytest.approx(stats["gpu_allocated_gib"])


@pytest.mark.gpu
def test_memory_of_cuda_graphs_is_told_from_other_memory():
    source = torch.ones(32 * 1024**2, device="cuda")
    before = graph_pool_bytes()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy = source + 1
    assert graph_pool_bytes() - before >= copy.untyped_storage().nbytes()
    stats = memory_stats()
    if "gpu_driver_gib" in stats:  # the driver sees this process under its own id
        assert stats["gpu_driver_gib"] > stats["gpu_reserved_gib"] >= 0.25
        assert 0 < stats["gpu_context_gib"] < 4


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


@pytest.mark.parametrize(
    ("nvml", "found"),
    [(Nvml((6, 5), (7, 9)), 9), (Nvml((6, 5)), None), (Nvml((7, None)), None), (Nvml((7, 9), fails=True), None)],
    ids=["its own", "other numbers in a container", "not counted", "not told"],
)
def test_it_is_this_process_that_counts(monkeypatch, nvml, found):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="abc"))
    assert process_gpu_bytes(nvml, pid=7) == found


def test_the_largest_of_processes_that_tell_differently_much():
    assert largest_of([{"a": 1.0, "b": 3.0}, {"a": 2.0}]) == {"a": 2.0, "b": 3.0}
