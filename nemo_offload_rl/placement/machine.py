"""Reads this machine's properties: usable host memory, GPUs and their links, and installed versions."""

import ctypes
import importlib.metadata
import mmap
import os
import platform
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nemo_offload_rl.memory.numa import NumaNode, gpu_numa_node, numa_nodes, prefer_node, read_text
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.gpus import GpuFacts, driver_version, gpu_facts, torch_pci_bus_id
from nemo_offload_rl.placement.link import LinkBenchmark, benchmark_link
from nemo_offload_rl.placement.rates import H200_RATES, Rates, rates_of
from nemo_offload_rl.storage.disk import cache_folder

PACKAGES = (
    "nemo-offload-rl",
    "torch",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "transformers",
    "ray",
    "cuda-bindings",
)

# By filesystem: the controller in /proc/self/cgroup, the files with the limit and the usage, and the name in
# memory.stat of the page cache that the kernel reclaims first.
_CGROUP_FILES = {
    "cgroup2": ("", "memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# cgroup v1 writes "no limit" as the largest multiple of the page size in a signed 64-bit integer.
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class HostFacts:
    """Describes the host memory that this process may use.

    Attributes:
        hostname: This machine's name.
        boot_id: The kernel's random boot id, which identifies the machine; "" where it is not available.
        total_bytes: All memory of the host (MemTotal).
        available_bytes: MemAvailable: memory available without swapping.
        cgroup_free_bytes: Bytes that the tightest of its cgroups still allows, counting page cache that the kernel
            reclaims first as free; None where no cgroup limits memory.
        memlock_bytes: RLIMIT_MEMLOCK, the soft limit; None where it is unlimited.
    """

    hostname: str
    boot_id: str
    total_bytes: int
    available_bytes: int
    cgroup_free_bytes: int | None
    memlock_bytes: int | None


@dataclass(frozen=True)
class MachineFacts:
    """Holds the properties of a machine that `nemo-offload-rl doctor` checks.

    Attributes:
        host: Host memory.
        gpus: All GPUs of the machine, whether or not this process may use them.
        visible_gpus: PCI addresses of the GPUs that torch can use, in torch's order.
        links: Measured link speeds of visible GPUs, by PCI address.
        not_measured: Reasons for links that could not be measured, by PCI address.
        numa_nodes: NUMA nodes by number.
        allowed_cpus: The CPUs that this process may run on.
        memory_policy_allowed: Whether the process may choose the NUMA node of its memory; None without NUMA nodes.
        versions: Versions by package name; None for a package that is not installed.
        torch_cuda: The CUDA version that torch was built for; None for a build without CUDA.
    """

    host: HostFacts
    gpus: tuple[GpuFacts, ...]
    visible_gpus: tuple[str, ...]
    links: Mapping[str, LinkBenchmark]
    not_measured: Mapping[str, str]
    numa_nodes: Mapping[int, NumaNode]
    allowed_cpus: frozenset[int]
    memory_policy_allowed: bool | None
    versions: Mapping[str, str | None]
    torch_cuda: str | None


def machine_facts() -> MachineFacts:
    """Reads the machine's properties and measures each link.

    A measurement takes about a second per GPU, and 2 GiB of host and GPU memory.
    """
    import torch

    host, nodes = host_facts(), numa_nodes()
    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = tuple(torch_pci_bus_id(index) for index in range(num_visible))
    links: dict[str, LinkBenchmark] = {}
    not_measured: dict[str, str] = {}
    for index, address in enumerate(visible):
        try:
            links[address] = _measure(index, address, host)
        except (RuntimeError, MemoryError) as error:
            not_measured[address] = str(error).partition("\n")[0] or type(error).__name__
    return MachineFacts(
        host=host,
        gpus=gpu_facts(),  # after the measurement: idle links slow down to save power
        visible_gpus=visible,
        links=links,
        not_measured=not_measured,
        numa_nodes=nodes,
        allowed_cpus=frozenset(os.sched_getaffinity(0)),
        memory_policy_allowed=any(map(_may_choose_node, nodes)) if nodes else None,
        versions=stack_versions() | {"nvidia driver": driver_version()},
        torch_cuda=torch.version.cuda,
    )


def _measure(index: int, address: str, host: HostFacts) -> LinkBenchmark:
    free = host.available_bytes if host.cgroup_free_bytes is None else min(host.available_bytes, host.cgroup_free_bytes)
    if free < 4 * GIB:  # twice what it takes
        raise MemoryError(f"only {free / GIB:.1f} GiB of host memory are free, and the measurement asks for 4")
    return benchmark_link(index, numa_node=gpu_numa_node(address))


def _may_choose_node(node: int) -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        start = ctypes.c_char.from_buffer(page)
        allowed = prefer_node(ctypes.addressof(start), mmap.PAGESIZE, node)
        del start  # it keeps the mapping open
    return allowed


def host_facts(proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> HostFacts:
    """Reads how much host memory this process may use.

    Args:
        proc: Where procfs is mounted.
        sysfs: Where sysfs is mounted, with the cgroups below it.
    """
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        hostname=platform.node(),
        boot_id=read_text(proc / "sys/kernel/random/boot_id") or "",
        total_bytes=kib["MemTotal"] * 1024,
        available_bytes=kib["MemAvailable"] * 1024,
        cgroup_free_bytes=min(_cgroups_free_bytes(proc, sysfs), default=None),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
    )


def rates_here() -> Rates:
    """Returns the rates that `nemo-offload-rl doctor --calibrate` measured with a GPU of this machine; else assumed."""
    try:
        are_kept = cache_folder("rates").is_dir()
    except (OSError, RuntimeError):  # no run needs them: the folder may not be read, or there is no home
        are_kept = False
    if not are_kept:  # asking for the GPUs may import torch
        return H200_RATES
    return rates_of(gpu.name for gpu in gpu_facts())


def stack_versions() -> dict[str, str | None]:
    """Returns the versions of kernel, Python and the relevant packages; None for a package that is not installed."""
    versions: dict[str, str | None] = {"linux": platform.release(), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _cgroups_free_bytes(proc: Path, sysfs: Path) -> Iterator[int]:
    """Yields the free bytes under each memory limit of this cgroup and its parents; v1 and v2 may both be mounted."""
    own_paths: dict[str, str] = {}
    for line in (read_text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        own_paths |= dict.fromkeys(controllers.split(","), path)
    for line in (read_text(proc / "self/mountinfo") or "").splitlines():
        mount, _, kind = line.partition(" - ")
        root, mount_point = mount.split()[3:5]
        filesystem, _, options = kind.split()[:3]
        # A hierarchy may be mounted a second time elsewhere.
        if filesystem not in _CGROUP_FILES or not mount_point.startswith("/sys/"):
            continue
        controller, *files = _CGROUP_FILES[filesystem]
        if controller not in own_paths or (controller and controller not in options.split(",")):
            continue
        below = _below(own_paths[controller], root)
        for folder in (below, *below.parents):
            free = _free_bytes(sysfs / mount_point.removeprefix("/sys/") / folder, *files)
            if free is not None:
                yield free


def _below(path: str, root: str) -> PurePosixPath:
    """Returns a cgroup's path relative to a mount of `root`; the mount itself if outside, as in some containers."""
    if ".." in PurePosixPath(path).parts or not PurePosixPath(path).is_relative_to(root):
        return PurePosixPath()
    return PurePosixPath(path).relative_to(root)


def _free_bytes(folder: Path, limit_file: str, usage_file: str, cache: str) -> int | None:
    limit, used = _number(read_text(folder / limit_file)), _number(read_text(folder / usage_file))
    if limit is None or used is None or limit >= _UNLIMITED:  # "max" in v2, or its root, which has no limit
        return None
    return max(0, limit - used + _statistic(folder, cache))


def _statistic(folder: Path, name: str) -> int:
    lines = (line.split() for line in (read_text(folder / "memory.stat") or "").splitlines())
    return next((int(words[1]) for words in lines if words[0] == name), 0)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
