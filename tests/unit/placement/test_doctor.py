import io
import json
import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from rich.console import Console

from nemo_offload_rl.cli import main
from nemo_offload_rl.memory.numa import NumaNode
from nemo_offload_rl.placement.doctor import Verdict, checks_table, facts_as_json, judge
from nemo_offload_rl.placement.gpus import GpuFacts
from nemo_offload_rl.placement.link import LinkBenchmark
from nemo_offload_rl.placement.machine import HostFacts, MachineFacts

GIB = 1 << 30
ADDRESS = "0000:65:00.0"
VERSIONS = {
    "linux": "6.8.0",
    "torch": "2.11.0",
    "megatron-core": "0.19.2",
    "transformer-engine": "2.20.2",
    "nvidia driver": "580.159.04",
}
GPU = GpuFacts(0, "NVIDIA H200", "GPU-1e2d", ADDRESS, 140 * GIB, 5, 16, 5, 16, 1)
SPEED = LinkBenchmark(55.4, 55.5, 101.7, 14.0)
TWO_NODES = {
    0: NumaNode(0, frozenset(range(8)), {0: 10, 1: 21}),
    1: NumaNode(1, frozenset(range(8, 16)), {0: 21, 1: 10}),
}
GOOD = MachineFacts(
    host=HostFacts("box", "d3b0", 2048 * GIB, 2000 * GIB, None, None),
    gpus=(GPU,),
    visible_gpus=(ADDRESS,),
    links={ADDRESS: SPEED},
    not_measured={},
    numa_nodes=TWO_NODES,
    allowed_cpus=frozenset(range(16)),
    memory_policy_allowed=True,
    versions=VERSIONS,
    torch_cuda="13.0",
)


def line(facts: MachineFacts, subject: str) -> tuple[str, str, str]:
    """Returns value, verdict and remedy of the only check with this subject."""
    (check,) = [check for check in judge(facts) if check.subject == subject]
    return check.found, check.verdict, check.remedy


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
        "GPUs": "1 x NVIDIA H200, 140.0 GiB",
        "GPU 0: link": "Gen5 x16 of Gen5 x16",
        "GPU 0: copies": "pinned D2H 55.4, H2D 55.5, both 101.7 GB/s in all; 88% of Gen5 x16",
        "GPU 0: page-locking": "14.0 GB/s",
        "GPU 0: NUMA": "node 1, CPUs 8-15; distance 21 to node 0, 10 to node 1",
        "memory policy": "may be set",
        "host memory": "2000.0 GiB of 2048.0 GiB",
        "cgroup": "no memory limit",
        "memlock": "unlimited",
        **VERSIONS,
    }


def test_a_machine_without_gpus():
    versions = VERSIONS | {"nvidia driver": None, "transformer-engine": None}
    facts = replace(GOOD, gpus=(), visible_gpus=(), links={}, versions=versions)
    assert line(facts, "GPUs")[1:] == (Verdict.MISSING, "install the NVIDIA driver; in a container: --gpus all")
    subjects = [check.subject for check in judge(facts)]
    assert not [subject for subject in subjects if subject.startswith("GPU ")]
    assert "transformer-engine" not in subjects
    assert line(replace(facts, host=replace(facts.host, memlock_bytes=8 << 20)), "memlock")[1] == Verdict.OK


def test_gpus_that_torch_cannot_use():
    second = replace(GPU, index=1, pci_bus_id="0000:e5:00.0")
    facts = replace(GOOD, gpus=(GPU, second))
    assert line(facts, "GPUs") == (
        "2 x NVIDIA H200, 140.0 GiB; torch can use 1",
        Verdict.WARNING,
        "unset CUDA_VISIBLE_DEVICES to use all of them",
    )
    assert line(facts, "GPU 1: copies")[:2] == ("not measured: torch cannot use this GPU", Verdict.MISSING)
    none = replace(facts, visible_gpus=(), links={})
    assert line(none, "GPUs")[1:] == (
        Verdict.MISSING,
        "unset CUDA_VISIBLE_DEVICES, or install a driver for CUDA 13.0",
    )
    assert "built without CUDA" in line(replace(none, torch_cuda=None), "GPUs")[2]


def test_a_link_with_too_few_lanes():
    found, verdict, remedy = line(with_gpu(link_width=8), "GPU 0: link")
    assert (found, verdict) == ("Gen5 x8 of Gen5 x16", Verdict.WARNING)
    assert "50% of the lanes: reseat the GPU" in remedy


def test_a_link_of_a_lower_generation_is_a_warning_unless_copies_show_that_it_only_slept():
    slow = replace(
        with_speed(d2h_gb_per_s=26.0, h2d_gb_per_s=26.0, both_gb_per_s=48.0), gpus=with_gpu(link_generation=4).gpus
    )
    assert line(slow, "GPU 0: link")[:2] == ("Gen4 x16 of Gen5 x16", Verdict.WARNING)
    assert line(slow, "GPU 0: copies")[:2] == (
        "pinned D2H 26.0, H2D 26.0, both 48.0 GB/s in all; 83% of Gen4 x16",
        Verdict.OK,
    )
    assert line(with_gpu(link_generation=1), "GPU 0: link")[1] == Verdict.OK
    assert line(replace(with_gpu(link_generation=4), links={}), "GPU 0: link")[1] == Verdict.WARNING


def test_an_unknown_link_is_said_to_be():
    assert line(with_gpu(link_width=None), "GPU 0: link")[:2] == (
        "not reported by the driver or sysfs",
        Verdict.MISSING,
    )
    found, verdict, _ = line(with_gpu(max_link_width=None), "GPU 0: link")
    assert (found, verdict) == ("Gen5 x16; the GPU's own limits are not known", Verdict.OK)
    assert "%" not in line(with_gpu(link_generation=None), "GPU 0: copies")[0]


def test_slow_copies():
    found, verdict, remedy = line(with_speed(h2d_gb_per_s=24.0, both_gb_per_s=60.0), "GPU 0: copies")
    assert found.endswith("38% of Gen5 x16")
    assert verdict == Verdict.WARNING
    assert "memory is on the GPU's NUMA node" in remedy


def test_directions_that_share_one_s_speed():
    _, verdict, remedy = line(with_speed(both_gb_per_s=60.0), "GPU 0: copies")
    assert verdict == Verdict.WARNING
    assert remedy.startswith("overlapped copies gain little here")


def test_a_link_that_is_faster_than_pci_express_is_well():
    speed = LinkBenchmark(350.0, 340.0, 600.0, 14.0)
    found, verdict, _ = line(replace(GOOD, links={ADDRESS: speed}), "GPU 0: copies")
    assert (found, verdict) == ("pinned D2H 350.0, H2D 340.0, both 600.0 GB/s in all", Verdict.OK)


def test_copies_that_could_not_be_measured_say_why():
    facts = replace(GOOD, links={}, not_measured={ADDRESS: "CUDA out of memory"})
    assert line(facts, "GPU 0: copies") == (
        "not measured: CUDA out of memory",
        Verdict.MISSING,
        "free the GPU or the memory, and run again",
    )


def test_slow_page_locking():
    found, verdict, remedy = line(with_speed(page_lock_gb_per_s=1.4), "GPU 0: page-locking")
    assert (found, verdict) == ("1.4 GB/s", Verdict.WARNING)
    assert "policy.residency.huge_pages=true" in remedy


def test_one_numa_node_is_nothing_to_think_about():
    facts = replace(GOOD, numa_nodes={0: NumaNode(0, frozenset(range(16)), {0: 10})})
    assert line(facts, "GPU 0: NUMA")[:2] == ("one node: all memory is local", Verdict.OK)
    assert "memory policy" not in {check.subject for check in judge(facts)}
    hidden = replace(GOOD, numa_nodes={}, memory_policy_allowed=None)
    assert "GPU 0: NUMA" not in {check.subject for check in judge(hidden)}


def test_numa_that_cannot_be_used():
    found, verdict, remedy = line(with_gpu(numa_node=None), "GPU 0: NUMA")
    assert (found, verdict) == ("the kernel does not report which of 2 nodes", Verdict.WARNING)
    assert "set policy.numa" in remedy
    _, verdict, remedy = line(replace(GOOD, allowed_cpus=frozenset({0, 1, 2, 5})), "GPU 0: NUMA")
    assert verdict == Verdict.WARNING
    assert "may use CPUs 0-2,5 only" in remedy
    denied = replace(GOOD, memory_policy_allowed=False)
    assert line(denied, "memory policy")[1] == Verdict.WARNING
    assert "--cap-add SYS_NICE" in line(denied, "memory policy")[2]


def test_a_gpu_s_memory_as_a_node_of_its_own_is_not_listed():
    nodes = {**TWO_NODES, 2: NumaNode(2, frozenset(), {0: 80, 1: 80, 2: 10})}
    assert line(replace(GOOD, numa_nodes=nodes), "GPU 0: NUMA")[0].endswith("distance 21 to node 0, 10 to node 1")


def test_host_memory_that_is_less_than_the_gpus():
    found, verdict, remedy = line(with_host(available_bytes=100 * GIB), "host memory")
    assert (found, verdict) == ("100.0 GiB of 2048.0 GiB", Verdict.WARNING)
    assert remedy.startswith("less than the GPUs' 140.0 GiB")


def test_a_cgroup_that_allows_less_than_there_is():
    assert line(with_host(cgroup_free_bytes=64 * GIB), "cgroup")[:2] == ("leaves 64.0 GiB", Verdict.WARNING)
    assert line(with_host(cgroup_free_bytes=2010 * GIB), "cgroup")[1] == Verdict.OK


def test_memlock_is_a_warning_unless_the_measurement_shows_that_it_does_not_bind():
    limited = with_host(memlock_bytes=8 << 20)
    assert line(limited, "memlock")[:2] == ("8 MiB; CUDA still page-locked 2 GiB", Verdict.OK)
    unproven = replace(limited, links={}, not_measured={ADDRESS: "no page-locking"})
    assert line(unproven, "memlock") == (
        "8 MiB",
        Verdict.WARNING,
        "ulimit -l unlimited; in a container: --ulimit memlock=-1",
    )


@pytest.mark.parametrize(
    ("package", "remedy"), [("torch", "make setup"), ("transformer-engine", "make setup EXTRAS=te; without it")]
)
def test_packages_that_are_not_installed(package, remedy):
    _, verdict, words = line(replace(GOOD, versions=VERSIONS | {package: None}), package)
    assert verdict == Verdict.MISSING
    assert words.startswith(remedy)


def test_json_has_every_fact_and_every_verdict():
    checks = judge(GOOD)
    facts = json.loads(facts_as_json(GOOD, checks))
    assert set(facts) == {field.name for field in fields(MachineFacts)} | {"checks"}
    assert facts["host"]["total_bytes"] == 2048 * GIB
    assert facts["links"][ADDRESS]["d2h_gb_per_s"] == 55.4
    assert facts["numa_nodes"]["1"] == {"number": 1, "cpus": list(range(8, 16)), "distances": {"0": 21, "1": 10}}
    assert facts["allowed_cpus"] == list(range(16))
    assert [check["subject"] for check in facts["checks"]] == [check.subject for check in checks]


def test_the_table_keeps_words_in_brackets():
    """A driver's "[N/A]" must not be read as markup."""
    console = Console(file=io.StringIO(), width=160)
    facts = replace(GOOD, links={}, not_measured={ADDRESS: "[Errno 12] no memory"})
    console.print(checks_table("box", judge(facts)))
    printed = console.file.getvalue()
    assert "not measured: [Errno 12] no memory" in printed
    assert "missing" in printed


def test_the_command_prints_a_table_of_this_machine():
    command = [sys.executable, "-m", "nemo_offload_rl.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in row.split("│")[1:-1]] for row in done.stdout.splitlines() if row.startswith("│")]
    assert [row[:3] for row in lines if row[0] == "torch"] == [["torch", torch.__version__.split("+")[0], "ok"]]
    assert {"GPUs", "host memory", "cgroup", "memlock"} <= {row[0] for row in lines}


def test_the_command_prints_json(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["host"]["hostname"] == os.uname().nodename
    assert len(facts["visible_gpus"]) == torch.cuda.device_count()
