"""Reads how much memory of its host a process may use."""

import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nemo_offload_rl.memory.numa import read_text

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
