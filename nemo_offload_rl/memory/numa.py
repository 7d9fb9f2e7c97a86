"""Finds a GPU's NUMA node, and binds a process's CPUs and memory to it before its first pinned page."""

import contextlib
import ctypes
import errno
import functools
import logging
import os
import platform
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

# include/uapi/linux/mempolicy.h. Never MPOL_BIND (2): once the node is full, the kernel kills without a message.
_MPOL_PREFERRED = 1
_MASK_WORD_BITS = 64
_SYSCALLS = {"x86_64": {"mbind": 237, "set_mempolicy": 238}, "aarch64": {"mbind": 235, "set_mempolicy": 237}}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class NumaNode:
    """Describes a NUMA node: its online CPUs (none if it is memory only, like a GB200's GPU memory) and distances."""

    number: int
    cpus: frozenset[int]
    distances: Mapping[int, int]


@dataclass(frozen=True)
class Binding:
    """Reports what `bind_process` did.

    Attributes:
        node: The node that the process was bound to; None if it was not bound.
        cpus: The CPUs that the calling thread may use now, ascending.
        memory_preferred: Whether new pages come from the node while it has free ones.
        note: A summary for the log.
    """

    node: int | None
    cpus: tuple[int, ...]
    memory_preferred: bool
    note: str


def numa_nodes(sysfs: Path = Path("/sys")) -> dict[int, NumaNode]:
    """Returns the machine's nodes by number, ascending; empty where the kernel shows none."""
    folder = sysfs / "devices/system/node"
    numbers = sorted(int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*"))
    nodes = {}
    for number in numbers:
        # The kernel lists distances to the online nodes in the order of their numbers, which may have gaps.
        distances = [int(word) for word in (read_text(folder / f"node{number}/distance") or "").split()]
        cpus = parse_cpu_list(read_text(folder / f"node{number}/cpulist") or "")
        nodes[number] = NumaNode(number, cpus, dict(zip(numbers, distances, strict=False)))
    return nodes


def gpu_numa_node(pci_bus_id: str, sysfs: Path = Path("/sys")) -> int | None:
    """Returns the node with CPUs that is nearest to a GPU.

    Args:
        pci_bus_id: As the driver or the kernel writes it, such as 00000000:65:00.0 or 0000:65:00.0.
        sysfs: Where sysfs is mounted.

    Returns:
        The node's number; None where sysfs does not single out one for this device.

    Raises:
        ValueError: If the text is not a PCI address.
    """
    device = sysfs / "bus/pci/devices" / normalize_pci_bus_id(pci_bus_id)
    nodes = numa_nodes(sysfs)
    with_cpus = [node for node in nodes.values() if node.cpus]
    named = read_text(device / "numa_node")
    if named is not None and int(named) in nodes:
        nearest = nodes[int(named)]
        if not nearest.cpus and with_cpus:
            # A distance that the kernel does not list counts as the farthest (ACPI's "unreachable").
            return min(with_cpus, key=lambda node: nearest.distances.get(node.number, 255)).number
        return nearest.number if nearest.cpus else None
    local_cpus = parse_cpu_list(read_text(device / "local_cpulist") or "")
    near = [node for node in with_cpus if node.cpus & local_cpus]
    if not near or (len(near) > 1 and len(near) == len(with_cpus)):
        return None
    return max(near, key=lambda node: len(node.cpus & local_cpus)).number


def bind_process(setting: str | int, pci_bus_id: str | None, sysfs: Path = Path("/sys")) -> Binding:
    """Bind this process to its GPU's node: the CPUs of all its threads, and the node that its new pages come from.

    Call it before the first large allocation. CPUs that the process was not allowed to use before are left out. The
    memory policy applies to the calling thread and to threads that it starts afterwards: running threads keep theirs.
    If the kernel or a container denies a call, a warning is logged and that setting stays as it was.

    Args:
        setting: `policy.numa`: "auto" for the GPU's node, "none" for no binding, or a node's number.
        pci_bus_id: The GPU's PCI address; None without a GPU.
        sysfs: Where sysfs is mounted.

    Raises:
        ValueError: If the setting is none of these, or names a node that does not exist or has no CPUs.
    """
    nodes = numa_nodes(sysfs)
    if setting == "none":
        return _not_bound("policy.numa is none")
    if setting == "auto":
        if pci_bus_id is None:
            return _not_bound("this process has no GPU")
        if sum(bool(node.cpus) for node in nodes.values()) < 2:
            return _not_bound("the machine has fewer than two NUMA nodes with CPUs")
        nearest = gpu_numa_node(pci_bus_id, sysfs)
        if nearest is None:
            return _not_bound(
                f"the kernel reports no NUMA node for GPU {pci_bus_id}; policy.numa also takes a node's number"
            )
        node, reason = nearest, f"nearest to GPU {pci_bus_id}"
    else:
        node, reason = _chosen_node(setting, nodes), "chosen by policy.numa"
    cpu_note = _bind_threads(node, nodes[node].cpus)
    mask, bits = _node_mask(node)
    error = _syscall("set_mempolicy", _MPOL_PREFERRED, ctypes.addressof(mask), bits)
    if error is not None:
        warning = f"{_denied('set_mempolicy', error)}: new pages come from the node of the CPU that first writes them"
        logger.warning("NUMA node %d: %s.", node, warning)
    note = f"NUMA node {node}, {reason}: {cpu_note}; {'memory preferred from it' if error is None else warning}"
    return Binding(node, _allowed_cpus(), error is None, note)


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Make the pages of a mapping come from a node while it has free ones; affects only pages not yet touched.

    Args:
        address: The mapping's start, a multiple of the page size.
        nbytes: Its length.
        node: The node's number.

    Returns:
        Whether the kernel accepted it. If not, a warning is logged, once in a process for each kind of refusal.
    """
    mask, bits = _node_mask(node)
    error = _syscall("mbind", address, nbytes, _MPOL_PREFERRED, ctypes.addressof(mask), bits, 0)
    if error is not None:
        _warn_once(f"{_denied('mbind', error)}: pinned memory comes from the node of the CPU that first writes it.")
    return error is None


def read_text(path: Path) -> str | None:
    """Returns the text of a sysfs or procfs file; None if it is missing, as in older kernels and containers."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def normalize_pci_bus_id(pci_bus_id: str) -> str:
    """Returns a PCI address as sysfs spells it: lower case, a domain of four digits."""
    found = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", pci_bus_id.lower())
    if found is None:
        raise ValueError(f"{pci_bus_id!r} is not a PCI address; expected a form like 0000:65:00.0.")
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def parse_cpu_list(text: str) -> frozenset[int]:
    """Returns the numbers of a kernel list such as 0-3,8,10-11."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpu_list(cpus: Set[int]) -> str:
    """Writes CPU numbers as Linux does; the inverse of `parse_cpu_list`."""
    firsts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    lasts = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(firsts, lasts, strict=True))


def _not_bound(reason: str) -> Binding:
    return Binding(None, _allowed_cpus(), False, f"not bound to a NUMA node: {reason}")


def _chosen_node(setting: str | int, nodes: Mapping[int, NumaNode]) -> int:
    valid = ", ".join(str(node.number) for node in nodes.values() if node.cpus) or "none"
    rule = f"set it to auto, none or the number of a node with CPUs; this machine has: {valid}."
    if isinstance(setting, str) or setting not in nodes:
        raise ValueError(f"policy.numa is {setting!r}, which is not a NUMA node of this machine; {rule}")
    if not nodes[setting].cpus:
        raise ValueError(f"policy.numa is {setting}, a NUMA node without CPUs; {rule}")
    return setting


def _bind_threads(node: int, node_cpus: frozenset[int]) -> str:
    cpus = node_cpus.intersection(_allowed_cpus())
    if not cpus:
        allowed = format_cpu_list(set(_allowed_cpus()))
        note = (
            f"CPUs unchanged, because the node's CPUs ({format_cpu_list(node_cpus)}) are not among those of this "
            f"process ({allowed})"
        )
        logger.warning("NUMA node %d: %s. Copies over the link between sockets are slower.", node, note)
        return note
    bound: set[int] = set()
    try:
        while threads := {int(path.name) for path in Path("/proc/self/task").iterdir()} - bound:
            for thread in threads:  # repeated, since a thread that was not bound yet may have started another one
                with contextlib.suppress(ProcessLookupError):  # the thread has ended
                    os.sched_setaffinity(thread, cpus)
            bound |= threads
    except OSError as error:
        note = f"CPUs unchanged, {_denied('sched_setaffinity', error)}"
        logger.warning("NUMA node %d: %s. The process may run far from its GPU, which slows copies.", node, note)
        return note
    return f"CPUs {format_cpu_list(cpus)}"


def _allowed_cpus() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def _node_mask(node: int) -> tuple[ctypes.Array[ctypes.c_uint64], int]:
    """Returns a node mask and its `maxnode`; the kernel reads one bit less than that."""
    words = node // _MASK_WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[-1] = 1 << (node % _MASK_WORD_BITS)
    return mask, words * _MASK_WORD_BITS + 1


def _syscall(name: str, *arguments: int) -> OSError | None:
    """Makes a system call that glibc does not wrap; returns the error if the kernel refuses it."""
    numbers = _SYSCALLS.get(platform.machine(), {})
    if name not in numbers:
        return OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.syscall(ctypes.c_long(numbers[name]), *map(ctypes.c_long, arguments)) == 0:
        return None
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _denied(call: str, error: OSError) -> str:
    hints = {errno.EPERM: " (in a container, --cap-add SYS_NICE allows it)", errno.EINVAL: " (not in this cpuset?)"}
    return f"{call} failed: {error.strerror}{hints[error.errno] if error.errno in hints else ''}"


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
