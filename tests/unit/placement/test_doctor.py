import io
import json
import os
from dataclasses import fields, replace

import pytest
import torch
from rich.console import Console

from nemo_offload_rl.cli import main
from nemo_offload_rl.memory.numa import NumaNode
from nemo_offload_rl.placement.doctor import Verdict, checks_table, facts_as_json, judge
from nemo_offload_rl.placement.gpus import GpuFacts
from nemo_offload_rl.placement.host import HostFacts
from nemo_offload_rl.placement.link import LinkBenchmark
from nemo_offload_rl.placement.machine import MachineFacts

GIB = 1 << 30
ADDRESS = "0000:65:00.0"
VERSIONS = {
    "linux": "6.8.0", "torch": "2.11.0", "megatron-core": "0.19.2", "transformer-engine": "2.20.2",
    "nvidia driver": "580.159.04",
}  # fmt: skip
GPU = GpuFacts(0, "NVIDIA H200", "GPU-1e2d", ADDRESS, 140 * GIB, 5, 16, 5, 16, 1)
SPEED = LinkBenchmark(55.4, 55.5, 101.7, 14.0)
TWO_NODES = {
    0: NumaNode(0, frozenset(range(8)), {0: 10, 1: 21}),
    1: NumaNode(1, frozenset(range(8, 16)), {0: 21, 1: 10}),
}
GOOD = MachineFacts(
    host=HostFacts("box", "d3b0", 2048 * GIB, 2000 * GIB, None, None), gpus=(GPU,), visible_gpus=(ADDRESS,),
    links={ADDRESS: SPEED}, not_measured={}, numa_nodes=TWO_NODES, allowed_cpus=frozenset(range(16)),
    memory_policy_allowed=True, versions=VERSIONS, torch_cuda="13.0",
)  # fmt: skip


def with_gpu(**changes: object) -> MachineFacts:
    return replace(GOOD, gpus=(replace(GPU, **changes),))


def with_speed(**changes: float) -> MachineFacts:
    return replace(GOOD, links={ADDRESS: replace(SPEED, **changes)})


def with_host(**changes: int | None) -> MachineFacts:
    return replace(GOOD, host=replace(GOOD.host, **changes))


def test_a_machine_where_all_is_well():
    checks = judge(GOOD)
    assert {check.verdict for check in checks} == {Verdict.OK}
    assert [check.remedy for check in checks if check.remedy] == []
    assert {check.subject: check.found for check in checks} == {
        "GPUs": "1 x NVIDIA H200, 140.0 GiB", "GPU 0: link": "Gen5 x16 of Gen5 x16",
        "GPU 0: copies": "pinned D2H 55.4, H2D 55.5, both 101.7 GB/s in all; 88% of Gen5 x16",
        "GPU 0: page-locking": "14.0 GB/s", "GPU 0: NUMA": "node 1, CPUs 8-15; distance 21 to node 0, 10 to node 1",
        "memory policy": "may be set", "host memory": "2000.0 GiB of 2048.0 GiB", "cgroup": "no memory limit",
        "memlock": "unlimited", **VERSIONS,
    }  # fmt: skip


NO_LIBRARIES = VERSIONS | {"nvidia driver": None, "transformer-engine": None}
WITHOUT_GPUS = replace(GOOD, gpus=(), visible_gpus=(), links={}, versions=NO_LIBRARIES)
TWO_GPUS = replace(GOOD, gpus=(GPU, replace(GPU, index=1, pci_bus_id="0000:e5:00.0")))
NONE_VISIBLE = replace(TWO_GPUS, visible_gpus=(), links={})
ONE_NODE = replace(GOOD, numa_nodes={0: NumaNode(0, frozenset(range(16)), {0: 10})})
GEN_4 = with_gpu(link_generation=4)
AS_GEN_4 = replace(with_speed(d2h_gb_per_s=26.0, h2d_gb_per_s=26.0, both_gb_per_s=48.0), gpus=GEN_4.gpus)
FASTER = replace(GOOD, links={ADDRESS: LinkBenchmark(350.0, 340.0, 600.0, 14.0)})
UNMEASURED = replace(GOOD, links={}, not_measured={ADDRESS: "[Errno 12] no memory"})
SLOW_H2D = with_speed(h2d_gb_per_s=24.0, both_gb_per_s=60.0)
WITH_100_GIB = with_host(available_bytes=100 * GIB)
LIMITED = with_host(memlock_bytes=8 << 20)
GPU_MEMORY_NODE = replace(GOOD, numa_nodes={**TWO_NODES, 2: NumaNode(2, frozenset(), {0: 80, 1: 80, 2: 10})})
# Facts, subject, what the check finds, its verdict, and words of its remedy.
CHECKS = [
    (WITHOUT_GPUS, "GPUs", "none: recipes run on the CPU", "missing", "the NVIDIA driver; in a container: --gpus all"),
    (replace(WITHOUT_GPUS, host=LIMITED.host), "memlock", "without a GPU nothing is page-locked", "ok", ""),
    (TWO_GPUS, "GPUs", "2 x NVIDIA H200, 140.0 GiB; torch can use 1", "warning", "unset CUDA_VISIBLE_DEVICES to use"),
    (TWO_GPUS, "GPU 1: copies", "not measured: torch cannot use this GPU", "missing", ""),
    (NONE_VISIBLE, "GPUs", "torch can use 0", "missing", "or install a driver for CUDA 13.0"),
    (replace(NONE_VISIBLE, torch_cuda=None), "GPUs", "torch can use 0", "missing", "built without CUDA"),
    (with_gpu(link_width=8), "GPU 0: link", "Gen5 x8 of Gen5 x16", "warning", "50% of the lanes: reseat the GPU"),
    (AS_GEN_4, "GPU 0: link", "Gen4 x16 of Gen5 x16", "warning", ""),
    (AS_GEN_4, "GPU 0: copies", "D2H 26.0, H2D 26.0, both 48.0 GB/s in all; 83% of Gen4 x16", "ok", ""),
    (with_gpu(link_generation=1), "GPU 0: link", "Gen1 x16 of Gen5 x16", "ok", ""),  # copies show that it only slept
    (replace(GEN_4, links={}), "GPU 0: link", "Gen4 x16 of Gen5 x16", "warning", ""),
    (with_gpu(link_width=None), "GPU 0: link", "not reported by the driver or sysfs", "missing", ""),
    (with_gpu(max_link_width=None), "GPU 0: link", "Gen5 x16; the GPU's own limits are not known", "ok", ""),
    (with_gpu(link_generation=None), "GPU 0: copies", "GB/s in all", "ok", ""),
    (SLOW_H2D, "GPU 0: copies", "38% of Gen5 x16", "warning", "the GPU's NUMA node"),
    (with_speed(both_gb_per_s=60.0), "GPU 0: copies", "", "warning", "overlapped copies gain little here"),
    (FASTER, "GPU 0: copies", "D2H 350.0, H2D 340.0, both 600.0 GB/s in all", "ok", ""),
    (UNMEASURED, "GPU 0: copies", "not measured: [Errno 12] no memory", "missing", "free the GPU or the memory"),
    (with_speed(page_lock_gb_per_s=1.4), "GPU 0: page-locking", "1.4 GB/s", "warning", "residency.huge_pages=true"),
    (ONE_NODE, "GPU 0: NUMA", "one node: all memory is local", "ok", ""),
    (with_gpu(numa_node=None), "GPU 0: NUMA", "does not report which of 2 nodes", "warning", "set policy.numa"),
    (replace(GOOD, allowed_cpus=frozenset({0, 1, 2, 5})), "GPU 0: NUMA", "", "warning", "may use CPUs 0-2,5 only"),
    (GPU_MEMORY_NODE, "GPU 0: NUMA", "distance 21 to node 0, 10 to node 1", "ok", ""),
    (replace(GOOD, memory_policy_allowed=False), "memory policy", "", "warning", "--cap-add SYS_NICE"),
    (WITH_100_GIB, "host memory", "100.0 GiB of 2048.0 GiB", "warning", "less than the GPUs' 140.0"),
    (with_host(cgroup_free_bytes=64 * GIB), "cgroup", "leaves 64.0 GiB", "warning", ""),
    (with_host(cgroup_free_bytes=2010 * GIB), "cgroup", "leaves 2010.0 GiB", "ok", ""),
    (LIMITED, "memlock", "8 MiB; CUDA still page-locked 2 GiB", "ok", ""),
    (replace(LIMITED, links={}), "memlock", "8 MiB", "warning", "unlimited; in a container: --ulimit memlock=-1"),
    (replace(GOOD, versions=VERSIONS | {"torch": None}), "torch", "", "missing", "make setup"),
    (replace(GOOD, versions=VERSIONS | {"transformer-engine": None}), "transformer-engine", "", "missing", "EXTRAS=te"),
]


@pytest.mark.parametrize(("facts", "subject", "found", "verdict", "remedy"), CHECKS)
def test_each_check_has_its_verdict_and_its_remedy(facts, subject, found, verdict, remedy):
    [check] = [check for check in judge(facts) if check.subject == subject]
    assert check.found.endswith(found) and check.verdict == verdict and remedy in check.remedy


def test_what_a_machine_does_not_have_is_not_checked():
    subjects = {check.subject for check in judge(WITHOUT_GPUS)}
    assert "transformer-engine" not in subjects
    assert not [subject for subject in subjects if subject.startswith("GPU ")]
    assert "memory policy" not in {check.subject for check in judge(ONE_NODE)}
    hidden = replace(GOOD, numa_nodes={}, memory_policy_allowed=None)
    assert "GPU 0: NUMA" not in {check.subject for check in judge(hidden)}


def test_the_table_keeps_words_in_brackets():
    """A driver's "[N/A]" must not be read as markup."""
    console = Console(file=io.StringIO(), width=160)
    console.print(checks_table("box", judge(UNMEASURED)))
    assert "not measured: [Errno 12] no memory" in console.file.getvalue()


def test_json_has_every_fact_and_every_verdict():
    checks = judge(GOOD)
    facts = json.loads(facts_as_json(GOOD, checks))
    assert set(facts) == {field.name for field in fields(MachineFacts)} | {"checks"}
    assert facts["host"]["total_bytes"] == 2048 * GIB
    assert facts["links"][ADDRESS]["d2h_gb_per_s"] == 55.4
    assert facts["numa_nodes"]["1"] == {"number": 1, "cpus": list(range(8, 16)), "distances": {"0": 21, "1": 10}}
    assert facts["allowed_cpus"] == list(range(16))
    assert [check["subject"] for check in facts["checks"]] == [check.subject for check in checks]


def test_the_command_prints_json(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["host"]["hostname"] == os.uname().nodename
    assert len(facts["visible_gpus"]) == torch.cuda.device_count()
    assert main(["doctor"]) == 0
    assert torch.__version__.split("+")[0] in capsys.readouterr().out  # in the table of this machine
