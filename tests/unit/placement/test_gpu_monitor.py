"""Tests readings of GPUs: from NVML (here a fake library), and from the actors of several nodes."""

import logging
import sys
import time
from types import SimpleNamespace

import pytest
import ray
from support.actors import kill_and_wait
from support.metrics_page import undocumented
from support.waiting import wait_until

from nemo_offload_rl.placement import gpu_monitor
from nemo_offload_rl.placement.gpu_monitor import GpuMonitor, GpuReader, NodeMonitor, NoGpuReadingsError, watch_gpus


class NVMLError(Exception):
    pass


class Nvml:
    """Replaces NVML with two GPUs; the second, a MIG slice, reports no power."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, num_gpus=2):
        self.num_gpus = num_gpus
        self.num_reads = 0

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUtilizationRates(self, gpu):
        self.num_reads += 1
        return SimpleNamespace(gpu=50 + gpu)

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(used=3 * 2**30)

    def nvmlDeviceGetPowerUsage(self, gpu):
        if gpu == 1:
            raise NVMLError("Not Supported")
        return 250_500

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return 40


def test_each_gpu_reports_what_it_can():
    assert GpuReader(Nvml()).read() == {
        0: {"utilization_percent": 50, "memory_gib": 3, "power_w": 250.5, "temperature_c": 40},
        1: {"utilization_percent": 51, "memory_gib": 3, "temperature_c": 40},
    }


def test_why_gpus_cannot_be_read_is_said(monkeypatch):
    with pytest.raises(NoGpuReadingsError, match="the driver reports no GPU"):
        GpuReader(Nvml(0))
    without_driver = Nvml()
    monkeypatch.setattr(without_driver, "nvmlInit", lambda: (_ for _ in ()).throw(NVMLError("Driver Not Loaded")))
    with pytest.raises(NoGpuReadingsError, match="NVML, the driver's library, failed: Driver Not Loaded"):
        GpuReader(without_driver)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoGpuReadingsError, match="nvidia-ml-py is not installed"):
        GpuReader()


class Node:
    def __init__(self, answers, start_s=0.0):
        time.sleep(start_s)
        self.answers = list(answers)

    def take(self):
        return self.answers.pop(0) if self.answers else []


def reading(utilization, memory):
    return {0: {"utilization_percent": utilization, "memory_gib": memory}}


def test_a_step_has_the_readings_of_all_nodes_since_the_step_before(ray_cluster, caplog):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    node = ray.remote(Node).options(num_cpus=0)
    answers = [[[reading(10.0, 7.0), reading(30.0, 5.0)], [reading(50.0, 1.0)]], ["it has no GPU"]]
    monitor = GpuMonitor([node.remote(of_node) for of_node in answers], flush_interval_s=0.2)
    seen = {}

    def is_complete():
        nonlocal seen
        seen = monitor.of_step(1)
        is_mean = seen.get("performance/gpus/node0/gpu0/utilization_percent") == 30.0
        return is_mean and bool(caplog.records)  # node1's error has been logged, too

    wait_until(is_complete)  # the mean of both collections
    assert seen["performance/gpus/node0/gpu0/memory_gib"] == 7.0  # the largest
    assert undocumented(seen) == []
    assert monitor.of_step(1) == seen
    assert monitor.of_step(2) == {}
    monitor.close()
    said = "logger.monitor_gpus: there are no readings from node1: it has no GPU."
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_node_without_gpus_says_so_once_and_nothing_waits(ray_cluster, caplog):
    if ray_cluster.has_gpus:
        pytest.skip("needs a node without GPUs")
    caplog.set_level(logging.WARNING)
    monitor = watch_gpus(ray_cluster.node_ids, collection_interval_s=0.1, flush_interval_s=0.1)
    assert monitor.of_step(1) == {}
    assert not caplog.records  # the node's actor has not answered yet
    wait_until(lambda: caplog.records)
    time.sleep(0.3)
    assert len(caplog.records) == 1 and "no readings from node0" in caplog.text
    monitor.close()


def test_a_node_gives_its_readings_until_it_is_closed_or_says_why_not(monkeypatch):
    monkeypatch.setattr(gpu_monitor, "ignore_ending_signals", lambda: None)  # an actor does this to its own process
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    node, samples = NodeMonitor(0.01), []
    wait_until(lambda: samples.extend(node.take()) or len(samples) > 2)
    assert samples[0][0]["power_w"] == 250.5
    node._sampler.close()
    assert 2 * len(samples + node.take()) == nvml.num_reads
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(num_gpus=0))
    assert NodeMonitor(3600.0).take() == "the driver reports no GPU"


def test_a_late_node_is_told_of_once_and_then_read_and_a_dead_one_ends_its_own_readings_alone(ray_cluster, caplog):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    node = ray.remote(Node).options(num_cpus=0)
    late, early, dead = (
        node.remote([[reading(7.0, 2.0)]], start_s=4.0),
        node.remote([[reading(1.0, 1.0)]]),
        node.remote([]),
    )
    kill_and_wait(dead)
    monitor = GpuMonitor([late, early, dead], flush_interval_s=0.1, late_after_s=0.5)
    wait_until(lambda: monitor.of_step(1))
    assert {name.split("/")[2] for name in monitor.of_step(1)} == {"node1"}  # node1 does not wait for the other
    wait_until(lambda: len(monitor.of_step(1)) == 4)
    assert monitor.of_step(1)["performance/gpus/node0/gpu0/utilization_percent"] == 7.0
    monitor.close()
    said = [record.getMessage() for record in caplog.records if "node0" in record.getMessage()]
    assert said == ["logger.monitor_gpus: node0 has sent no readings for 0.5 s; they are recorded once they arrive."]
    assert "no readings from node2: its actor does not answer (ActorDiedError)" in caplog.text


@pytest.mark.gpu
def test_the_gpus_of_a_node_are_read(ray_cluster):
    monitor = watch_gpus(ray_cluster.node_ids, collection_interval_s=0.1, flush_interval_s=0.1)
    wait_until(lambda: monitor.of_step(1))
    assert monitor.of_step(1)["performance/gpus/node0/gpu0/memory_gib"] > 0
    monitor.close()
