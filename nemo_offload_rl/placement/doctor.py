"""Checks whether a machine is fit for offloading, and prints the report of `nemo-offload-rl doctor`."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_offload_rl.memory.numa import format_cpu_list
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.gpus import GpuFacts
from nemo_offload_rl.placement.host import HostFacts
from nemo_offload_rl.placement.link import pcie_gb_per_s
from nemo_offload_rl.placement.machine import MachineFacts, machine_facts
from nemo_offload_rl.placement.rates import Curve, Rates, keep_rates

# Copies from page-locked memory reach 80% to 90% of a PCI Express link (an H200 on Gen5 x16: 55.4 of 63 GB/s).
GOOD_SHARE_OF_LINK = 0.7
# An H200 carries 1.84 times as much in both directions at once as in one.
GOOD_DUPLEX_GAIN = 1.5
# torch's own pin_memory=True page-locks 1.4 GB/s on the machine where `memory.pinned.PinnedArena` page-locks 14.
GOOD_PAGE_LOCK_GB_PER_S = 3.0

REQUIRED_PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformers", "ray")


class Verdict(StrEnum):
    """Lists the possible results of a check."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True)
class Check:
    """Holds a line of `nemo-offload-rl doctor`; the remedy is empty if nothing needs to be done."""

    subject: str
    found: str
    verdict: Verdict
    remedy: str = ""


def judge(facts: MachineFacts) -> list[Check]:
    """Returns a check of everything that matters for offloading, in the order of the report."""
    return [
        _gpus(facts),
        *(check for gpu in facts.gpus for check in _gpu(gpu, facts)),
        *_memory_policy(facts),
        _available(facts),
        _cgroup(facts.host),
        _memlock(facts),
        *_versions(facts),
    ]


def _gpus(facts: MachineFacts) -> Check:
    num_gpus, num_visible = len(facts.gpus), len(facts.visible_gpus)
    if not facts.gpus:
        return Check(
            "GPUs",
            "none: recipes run on the CPU",
            Verdict.MISSING,
            "install the NVIDIA driver; in a container: --gpus all",
        )
    names = dict.fromkeys(f"{gpu.name}, {_gib(gpu.total_bytes)}" for gpu in facts.gpus)
    found = f"{num_gpus} x {' + '.join(names)}"
    if num_visible == num_gpus:
        return Check("GPUs", found, Verdict.OK)
    found += f"; torch can use {num_visible}"
    if num_visible:
        return Check("GPUs", found, Verdict.WARNING, "unset CUDA_VISIBLE_DEVICES to use all of them")
    if facts.torch_cuda is None:
        return Check("GPUs", found, Verdict.MISSING, "this torch is built without CUDA: install the locked one")
    remedy = f"unset CUDA_VISIBLE_DEVICES, or install a driver for CUDA {facts.torch_cuda}"
    return Check("GPUs", found, Verdict.MISSING, remedy)


def _gpu(gpu: GpuFacts, facts: MachineFacts) -> Iterator[Check]:
    yield _link(gpu, facts)
    yield from _copies(gpu, facts)
    if facts.numa_nodes:
        yield _numa(gpu, facts)


def _link(gpu: GpuFacts, facts: MachineFacts) -> Check:
    subject = f"GPU {gpu.index}: link"
    if gpu.link_width is None or gpu.link_generation is None:
        return Check(subject, "not reported by the driver or sysfs", Verdict.MISSING, "judge by the measured copies")
    found = f"Gen{gpu.link_generation} x{gpu.link_width}"
    if gpu.max_link_width is None or gpu.max_link_generation is None:
        return Check(subject, f"{found}; the GPU's own limits are not known", Verdict.OK)
    limits = f"{found} of Gen{gpu.max_link_generation} x{gpu.max_link_width}"
    if gpu.link_width < gpu.max_link_width:
        share = gpu.link_width / gpu.max_link_width
        remedy = f"copies have {share:.0%} of the lanes: reseat the GPU, use a wider slot, check BIOS bifurcation"
        return Check(subject, limits, Verdict.WARNING, remedy)
    limit, measured = pcie_gb_per_s(gpu.link_generation, gpu.link_width), facts.links.get(gpu.pci_bus_id)
    if gpu.link_generation < gpu.max_link_generation and not (
        measured is not None and limit is not None and measured.d2h_gb_per_s > limit
    ):
        remedy = "if copies are slow, too: a faster slot, riser or BIOS setting; an idle GPU may lower its generation"
        return Check(subject, limits, Verdict.WARNING, remedy)
    return Check(subject, limits, Verdict.OK)


def _copies(gpu: GpuFacts, facts: MachineFacts) -> Iterator[Check]:
    subject = f"GPU {gpu.index}: copies"
    speed = facts.links.get(gpu.pci_bus_id)
    if speed is None:
        reason = facts.not_measured.get(gpu.pci_bus_id, "torch cannot use this GPU")
        yield Check(subject, f"not measured: {reason}", Verdict.MISSING, "free the GPU or the memory, and run again")
        return
    found = (
        f"pinned D2H {speed.d2h_gb_per_s:.1f}, H2D {speed.h2d_gb_per_s:.1f}, both {speed.both_gb_per_s:.1f} GB/s in all"
    )
    limit = pcie_gb_per_s(gpu.link_generation, gpu.link_width)
    slower = min(speed.d2h_gb_per_s, speed.h2d_gb_per_s)
    if limit is not None and slower <= limit:
        found += f"; {slower / limit:.0%} of Gen{gpu.link_generation} x{gpu.link_width}"
    if limit is not None and slower < GOOD_SHARE_OF_LINK * limit:
        remedy = "check that nothing else copies, that memory is on the GPU's NUMA node and that no IOMMU translates"
        yield Check(subject, found, Verdict.WARNING, remedy)
    elif speed.both_gb_per_s < GOOD_DUPLEX_GAIN * slower:
        remedy = "overlapped copies gain little here: check that all memory channels are populated"
        yield Check(subject, found, Verdict.WARNING, remedy)
    else:
        yield Check(subject, found, Verdict.OK)
    rate = speed.page_lock_gb_per_s
    if rate < GOOD_PAGE_LOCK_GB_PER_S:
        remedy = "workers start slowly: give them more CPUs, or set policy.residency.huge_pages=true"
        yield Check(f"GPU {gpu.index}: page-locking", f"{rate:.1f} GB/s", Verdict.WARNING, remedy)
    else:
        yield Check(f"GPU {gpu.index}: page-locking", f"{rate:.1f} GB/s", Verdict.OK)


def _numa(gpu: GpuFacts, facts: MachineFacts) -> Check:
    subject = f"GPU {gpu.index}: NUMA"
    with_cpus = [node for node in facts.numa_nodes.values() if node.cpus]
    if len(with_cpus) < 2:
        return Check(subject, "one node: all memory is local", Verdict.OK)
    if gpu.numa_node is None:
        remedy = "set policy.numa to the node that `nvidia-smi topo -m` names; a virtual machine may hide it"
        return Check(subject, f"the kernel does not report which of {len(with_cpus)} nodes", Verdict.WARNING, remedy)
    near = facts.numa_nodes[gpu.numa_node]
    distances = ", ".join(
        f"{near.distances[node.number]} to node {node.number}" for node in with_cpus if node.number in near.distances
    )
    found = f"node {near.number}, CPUs {format_cpu_list(near.cpus)}; distance {distances or 'not known'}"
    if not near.cpus & facts.allowed_cpus:
        remedy = f"this process may use CPUs {format_cpu_list(facts.allowed_cpus)} only: add the node's (--cpuset-cpus)"
        return Check(subject, found, Verdict.WARNING, remedy)
    return Check(subject, found, Verdict.OK)


def _memory_policy(facts: MachineFacts) -> Iterator[Check]:
    if facts.memory_policy_allowed is None or sum(bool(node.cpus) for node in facts.numa_nodes.values()) < 2:
        return
    if facts.memory_policy_allowed:
        yield Check("memory policy", "may be set", Verdict.OK)
    else:
        remedy = "pinned memory may end up far from its GPU; in a container: --cap-add SYS_NICE"
        yield Check("memory policy", "mbind is denied", Verdict.WARNING, remedy)


def _available(facts: MachineFacts) -> Check:
    host = facts.host
    found = f"{_gib(host.available_bytes)} of {_gib(host.total_bytes)}"
    gpu_bytes = sum(gpu.total_bytes or 0 for gpu in facts.gpus)
    if host.available_bytes < gpu_bytes:
        remedy = f"less than the GPUs' {_gib(gpu_bytes)}: see what a recipe needs with `nemo-offload-rl plan`"
        return Check("host memory", found, Verdict.WARNING, remedy)
    return Check("host memory", found, Verdict.OK)


def _cgroup(host: HostFacts) -> Check:
    if host.cgroup_free_bytes is None:
        return Check("cgroup", "no memory limit", Verdict.OK)
    found = f"leaves {_gib(host.cgroup_free_bytes)}"
    if host.cgroup_free_bytes < host.available_bytes:
        remedy = "this limit applies, not the machine's memory: raise it (--memory) if a recipe does not fit"
        return Check("cgroup", found, Verdict.WARNING, remedy)
    return Check("cgroup", found, Verdict.OK)


def _memlock(facts: MachineFacts) -> Check:
    limit = facts.host.memlock_bytes
    if limit is None:
        return Check("memlock", "unlimited", Verdict.OK)
    found = f"{limit >> 20} MiB"
    if not facts.gpus:
        return Check("memlock", f"{found}; without a GPU nothing is page-locked", Verdict.OK)
    if facts.links and limit < GIB:  # the link's measurement has page-locked more
        found += "; CUDA still page-locked 2 GiB"
        return Check("memlock", found, Verdict.OK, "InfiniBand needs more: ulimit -l unlimited, --ulimit memlock=-1")
    remedy = "ulimit -l unlimited; in a container: --ulimit memlock=-1"
    return Check("memlock", found, Verdict.WARNING, remedy)


def _versions(facts: MachineFacts) -> Iterator[Check]:
    for name, version in facts.versions.items():
        if version is not None:
            yield Check(name, version, Verdict.OK)
        elif name in REQUIRED_PACKAGES:
            yield Check(name, "not installed", Verdict.MISSING, "make setup")
        elif name == "transformer-engine" and facts.gpus:
            remedy = "make setup EXTRAS=te; without it, no activation offloading and no precision-aware optimizer"
            yield Check(name, "not installed", Verdict.MISSING, remedy)
        elif name == "nvidia driver" and facts.gpus:
            yield Check(name, "its version is hidden", Verdict.WARNING, "NVIDIA_DRIVER_CAPABILITIES=all shows it")


def _gib(nbytes: int | None) -> str:
    return "memory not known" if nbytes is None else f"{nbytes / GIB:.1f} GiB"


_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.MISSING: "red"}
# Without a terminal rich uses 80 columns, too few for the remedies.
_WIDTH_WITHOUT_TERMINAL = 160


def run_doctor(as_json: bool, console: Console | None = None) -> None:
    """Examines this machine and prints the results.

    Args:
        as_json: Print facts and checks as one JSON object instead of a table.
        console: Where to print; None for the standard output.
    """
    console = _console() if console is None else console
    facts = machine_facts()
    checks = judge(facts)
    if as_json:
        console.file.write(facts_as_json(facts, checks) + "\n")
    else:
        console.print(checks_table(facts.host.hostname, checks))


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH_WITHOUT_TERMINAL)


def run_calibration(as_json: bool, console: Console | None = None) -> None:
    """Measures the rates of this machine's current GPU, keeps them for the plan, and prints them.

    Args:
        as_json: Print the rates as JSON, as in the file.
        console: Where to print; None for the standard output.

    Raises:
        ValueError: There is no GPU, it cannot be measured, or the file cannot be written.
    """
    from nemo_offload_rl.placement.calibrate import calibrate_here

    rates, gpu = calibrate_here()
    console = _console() if console is None else console
    if as_json:
        console.file.write(json.dumps(rates.as_fields(), indent=2) + "\n")
    else:
        console.print(rates_table(gpu, rates))
    path = keep_rates(rates, gpu)  # behind the table, which took half a minute
    if not as_json:
        console.print(f"kept in {path}, from which nemo-offload-rl plan and runs on this machine predict seconds")


def rates_table(title: str, rates: Rates) -> Table:
    """Returns a table with a row per rate."""
    table = Table(title=f"{title}: rates", title_justify="left")
    for heading in ("rate", "measured"):
        table.add_column(heading, overflow="fold")
    table.add_row("matrix products, TFLOP/s", _points(rates.matmul, 1e9, "GFLOP"))
    for one in rates.attention:
        for name, curve in (("forward", one.forward), ("backward", one.backward)):
            table.add_row(f"attention, heads of {one.head_dim}, {name}, TFLOP/s", _points(curve, 1, "tokens"))
    table.add_row("GPU memory, read and written, TB/s", f"{rates.memory_bytes_per_s / 1e12:.2f}")
    table.add_row("link, the slower direction, GB/s", f"{rates.link_bytes_per_s / 1e9:.1f}")
    table.add_row("a small operation on the host, us", f"{rates.launch_s * 1e6:.1f}")
    table.add_row("Adam on the CPU, G parameters/s", f"{rates.cpu_params_per_s / 1e9:.2f}")
    return table


def _points(curve: Curve, unit: float, name: str) -> str:
    return ", ".join(f"{rate / 1e12:.0f} ({size / unit:,.0f} {name})" for size, rate in curve.points)


def facts_as_json(facts: MachineFacts, checks: list[Check]) -> str:
    """Returns the fields of `MachineFacts`, and the checks under `checks`; sizes in bytes, speeds in GB/s."""
    fields = dataclasses.asdict(facts) | {"checks": [dataclasses.asdict(check) for check in checks]}
    return json.dumps(fields, indent=2, default=sorted)  # sorted: sets of CPUs


def checks_table(title: str, checks: list[Check]) -> Table:
    """Returns a table with a row per check."""
    table = Table(title=f"{title}: fitness for offloading", title_justify="left")
    for heading in ("property", "found", "verdict", "remedy"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        verdict = Text(check.verdict, style=_STYLES[check.verdict])
        table.add_row(Text(check.subject), Text(check.found), verdict, Text(check.remedy))
    return table
