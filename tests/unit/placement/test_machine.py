import dataclasses
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_offload_rl.placement.gpus import GpuFacts, driver_version, gpu_facts, torch_pci_bus_id
from nemo_offload_rl.placement.host import HostFacts, host_facts
from nemo_offload_rl.placement.link import benchmark_link

GIB = 1 << 30
NO_LIMIT_V1 = str(2**63 - 4096)

MOUNTS = {
    "v1": "32 31 0:29 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "33 31 0:30 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n",
    "v2": "30 23 0:27 {root} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
    "hybrid": "32 31 0:29 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "34 31 0:31 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n",
}
OWN_PATHS = {"v1": "4:memory:{path}\n1:cpu:/\n", "v2": "0::{path}\n", "hybrid": "4:memory:{path}\n0::/\n"}


class Host:
    """Writes a procfs and a sysfs in a folder: 64 GiB of memory, 48 of them available."""

    def __init__(self, folder: Path, version: str, path: str = "/", root: str = "/") -> None:
        self.proc, self.sysfs = folder / "proc", folder / "sys"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            f"MemTotal:       {64 << 20} kB\nMemFree:  1024 kB\nMemAvailable:   {48 << 20} kB\nHugePages_Total:  0\n"
        )
        (self.proc / "self/cgroup").write_text(OWN_PATHS[version].format(path=path))
        other = "22 1 0:20 / / rw - ext4 /dev/root rw\n"
        (self.proc / "self/mountinfo").write_text(other + MOUNTS[version].format(root=root))

    def group(self, folder: str, **files: object) -> None:
        """Writes files of a cgroup; `memory_stat` is a mapping, and underscores in names become points."""
        path = self.sysfs / "fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, contents in files.items():
            if isinstance(contents, dict):
                contents = "".join(f"{key} {value}\n" for key, value in contents.items())
            (path / name.replace("memory_", "memory.")).write_text(f"{contents}\n")

    def free(self) -> int | None:
        return self.facts().cgroup_free_bytes

    def facts(self) -> HostFacts:
        return host_facts(self.proc, self.sysfs)


def test_memory_is_that_of_meminfo_and_the_boot_is_the_kernels(tmp_path):
    host = Host(tmp_path, "v2")
    facts = host.facts()
    assert (facts.total_bytes, facts.available_bytes) == (64 * GIB, 48 * GIB)
    assert (facts.hostname, facts.boot_id) == (platform.node(), "")
    (host.proc / "sys/kernel/random").mkdir(parents=True)
    (host.proc / "sys/kernel/random/boot_id").write_text("5e1f-a0\n")
    assert host.facts().boot_id == "5e1f-a0"


def test_without_cgroup_files_there_is_no_limit(tmp_path):
    host = Host(tmp_path, "v2", path="/user.slice")
    assert host.free() is None
    (host.proc / "self/cgroup").unlink()
    assert host.free() is None
    (host.proc / "self/mountinfo").unlink()
    assert host.free() is None


def limit_v1(limit: object, usage: int, **stat: int) -> dict[str, object]:
    return {"memory_limit_in_bytes": limit, "memory_usage_in_bytes": usage} | ({"memory_stat": stat} if stat else {})


def limit_v2(limit: object, current: int, **stat: int) -> dict[str, object]:
    return {"memory_max": limit, "memory_current": current} | ({"memory_stat": stat} if stat else {})


NESTED = {
    "slice/pod/container": limit_v2("max", GIB), "slice/pod": limit_v2(8 * GIB, 6 * GIB, inactive_file=0),
    "slice": limit_v2(20 * GIB, 19 * GIB, inactive_file=GIB // 2), "slice/other": limit_v2(1, 1),
}  # fmt: skip
DOCKER = {
    "memory/docker/abc": limit_v1(10 * GIB, 4 * GIB, inactive_file=1, total_inactive_file=GIB),
    "memory/docker": limit_v1(NO_LIMIT_V1, 60 * GIB),
}
PAGE_CACHE = {"anon": 3 * GIB, "inactive_file": GIB, "active_file": 2 * GIB}
ROOT_GROUP = {"memory_stat": {"inactive_file": GIB}}  # has neither limit nor usage
# Version, the process's group, the mount's root, files of groups, and the GiB that they leave.
CGROUPS = {
    "page cache that goes first is free": ("v2", "/pod", "/", {"pod": limit_v2(10 * GIB, 7 * GIB, **PAGE_CACHE)}, 4),
    "v2 without a limit": ("v2", "/pod", "/", {"pod": limit_v2("max", 7 * GIB), "": ROOT_GROUP}, None),
    "the tightest of nested groups": ("v2", "/slice/pod/container", "/", NESTED, 1.5),
    "a limit below what is used": ("v2", "/pod", "/", {"pod": limit_v2(GIB, 2 * GIB)}, 0),
    "v1": ("v1", "/docker/abc", "/", DOCKER, 7),
    "v1 without a limit": ("v1", "/", "/", {"memory": limit_v1(NO_LIMIT_V1, GIB)}, None),
    "v1 beside v2": ("hybrid", "/job", "/", {"memory/job": limit_v1(3 * GIB, GIB), "unified": {}}, 2),
    # The kernel names a container's group as the host sees it, or one outside of the mount.
    "own group as the mount": ("v1", "/docker/abc", "/docker/abc", {"memory": limit_v1(3 * GIB, GIB)}, 2),
    "a mount elsewhere": ("v1", "/docker/abc", "/elsewhere", {"memory": limit_v1(3 * GIB, GIB)}, 2),
    "a mount above": ("v1", "/docker/abc", "/../..", {"memory": limit_v1(3 * GIB, GIB)}, 2),
    "beside the namespace": ("v2", "/../other", "/", {"": limit_v2(3 * GIB, GIB), "../other": limit_v2(1, 1)}, 2),
}


@pytest.mark.parametrize(("version", "path", "root", "groups", "free_gib"), CGROUPS.values(), ids=CGROUPS)
def test_a_cgroup_leaves_what_its_limit_says(tmp_path, version, path, root, groups, free_gib):
    host = Host(tmp_path, version, path=path, root=root)
    for folder, files in groups.items():
        host.group(folder, **files)
    assert host.free() == (None if free_gib is None else free_gib * GIB)


def test_memlock_is_this_process_s_soft_limit():
    limit = 64 << 10
    code = (
        "import resource, sys; from nemo_offload_rl.placement.host import host_facts\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[1]), hard)); print(host_facts().memlock_bytes)"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < limit:
        pytest.skip(f"the hard limit here is {hard}")
    done = subprocess.run([sys.executable, "-c", code, str(limit)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(limit)


# Tests of GPUs replace nvidia-smi on PATH with a script.

H200 = "0, NVIDIA H200, GPU-1e2d, 00000000:65:00.0, 143771, 5, 16, 5, 16, 580.159.04"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Returns a function that makes an nvidia-smi the only program on PATH; it writes its arguments to a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(*lines: str, status: int = 0) -> Path:
        script = folder / "nvidia-smi"
        said = "\n".join(["/bin/cat <<'END'", *lines, "END"])
        script.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\n{said}\nexit {status}\n')
        script.chmod(0o755)
        return folder / "arguments"

    return install


def link_of(gpu: GpuFacts) -> tuple[int | None, ...]:
    return gpu.link_generation, gpu.link_width, gpu.max_link_generation, gpu.max_link_width


def test_gpus_are_those_of_nvidia_smi(tmp_path, nvidia_smi):
    arguments = nvidia_smi(H200, "1, NVIDIA H200, GPU-77aa, 00000000:E5:00.0, 143771, 1, 8, 5, 16, 580.159.04")
    first, second = gpu_facts(tmp_path)
    assert first == GpuFacts(0, "NVIDIA H200", "GPU-1e2d", "0000:65:00.0", 143771 << 20, 5, 16, 5, 16, None)
    assert (second.index, second.pci_bus_id, link_of(second)) == (1, "0000:e5:00.0", (1, 8, 5, 16))
    link = "pcie.link.gen.current,pcie.link.width.current,pcie.link.gen.max,pcie.link.width.max"
    query = f"--query-gpu=index,name,uuid,pci.bus_id,memory.total,{link},driver_version"
    assert arguments.read_text().split() == [query, "--format=csv,noheader,nounits"]
    assert driver_version(tmp_path) == "580.159.04"


def pci_device(sysfs: Path, **files: object) -> None:
    folder = sysfs / "bus/pci/devices/0000:65:00.0"
    folder.mkdir(parents=True)
    for name, contents in files.items():
        (folder / name).write_text(f"{contents}\n")


UNKNOWN = "[N/A], [N/A], [Not Supported], [N/A], [N/A]"


GEN_4_X8 = ("16.0 GT/s PCIe", 8, "32.0 GT/s PCIe", 16)


@pytest.mark.parametrize(
    ("said", "in_sysfs", "link"),
    [
        (UNKNOWN, GEN_4_X8, (4, 8, 5, 16)),
        ("143771, 4, 8, 4, 8", GEN_4_X8, (4, 8, 5, 16)),  # the driver calls the slot's lanes the most
        (UNKNOWN, ("Unknown", 0, "2000.0 GT/s", 255), (None,) * 4),
    ],
)
def test_what_the_driver_does_not_say_comes_from_sysfs(tmp_path, nvidia_smi, said, in_sysfs, link):
    nvidia_smi(f"0, NVIDIA H200, GPU-1e2d, 00000000:65:00.0, {said}, 580.159.04")
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    pci_device(tmp_path, **dict(zip(names, in_sysfs, strict=True)))
    (gpu,) = gpu_facts(tmp_path)
    assert link_of(gpu) == link
    assert gpu.total_bytes == (None if said == UNKNOWN else 143771 << 20)
    assert gpu.numa_node is None


def test_a_gpu_s_node_is_in_its_facts(tmp_path, nvidia_smi):
    nvidia_smi(H200)
    pci_device(tmp_path, numa_node=1)
    for node, cpus in enumerate(["0-3", "4-7"]):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(cpus)
    assert gpu_facts(tmp_path)[0].numa_node == 1


@pytest.mark.parametrize("said", ["No devices were found", ""])
def test_a_driver_without_gpus(tmp_path, nvidia_smi, said):
    nvidia_smi(said)
    assert gpu_facts(tmp_path) == ()
    assert driver_version(tmp_path) is None


def test_an_nvidia_smi_that_fails_is_a_warning_and_torch_is_asked(tmp_path, nvidia_smi, caplog):
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", status=9)
    assert len(gpu_facts(tmp_path)) == torch.cuda.device_count()
    assert "nvidia-smi gives no answer" in caplog.text
    assert "exit status 9" in caplog.text


def test_without_nvidia_smi_the_gpus_are_torch_s_and_the_version_is_the_module_s(tmp_path, nvidia_smi):
    assert driver_version(tmp_path) is None
    of_torch = [torch_pci_bus_id(index) for index in range(torch.cuda.device_count())]
    assert [gpu.pci_bus_id for gpu in gpu_facts(tmp_path)] == of_torch
    (tmp_path / "module/nvidia").mkdir(parents=True)
    (tmp_path / "module/nvidia/version").write_text("580.95.05\n")
    assert driver_version(tmp_path) == "580.95.05"


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_a_link_is_measured_and_gives_everything_back():
    torch.cuda.empty_cache()  # frees what earlier tests cached
    before = torch.cuda.memory_reserved(0)
    speed = benchmark_link(0, block_bytes=64 << 20, repeats=3)
    assert all(rate > 0 for rate in dataclasses.astuple(speed))
    assert torch.cuda.memory_reserved(0) == before


@pytest.mark.gpu
def test_torch_and_the_driver_mean_the_same_gpus():
    addresses = {gpu.pci_bus_id for gpu in gpu_facts()}
    assert {torch_pci_bus_id(index) for index in range(torch.cuda.device_count())} <= addresses
