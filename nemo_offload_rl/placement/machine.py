"""Reads this machine's properties: its host memory, GPUs and their links, rates, and installed versions."""

import ctypes
import importlib.metadata
import mmap
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_offload_rl.memory.numa import NumaNode, gpu_numa_node, numa_nodes, prefer_node
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.gpus import GpuFacts, driver_version, gpu_facts, torch_pci_bus_id
from nemo_offload_rl.placement.host import HostFacts, host_facts
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
