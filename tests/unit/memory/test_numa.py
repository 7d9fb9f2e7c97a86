import ctypes
import errno
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_offload_rl.memory import numa
from nemo_offload_rl.memory.numa import bind_process, format_cpu_list, gpu_numa_node, numa_nodes, prefer_node

GPU = "0000:65:00.0"


def make_sysfs(root: Path, nodes: dict[int, tuple[str, str]], devices: dict[str, dict[str, str]] | None = None) -> Path:
    """Writes nodes, each (cpulist, distance), and PCI devices, each {file: contents}, as sysfs files."""
    (root / "devices/system/node").mkdir(parents=True)
    (root / "devices/system/node/online").write_text("0\n")
    for number, (cpus, distances) in nodes.items():
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "distance").write_text(f"{distances}\n")
    for address, files in (devices or {}).items():
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
    return root


TWO_SOCKETS = {0: ("0-3,8-11", "10 21"), 1: ("4-7,12-15", "21 10")}
# Grace CPUs on nodes 0 and 1; each GPU's memory is a node without CPUs, with spare nodes between them.
GB200 = {0: ("0-71", "10 40 80 120"), 1: ("72-143", "40 10 120 80"), 2: ("", "80 120 10 160")}
GB200[10] = ("", "120 80 160 10")


def test_nodes_are_read_with_their_cpus_and_distances(tmp_path):
    nodes = numa_nodes(make_sysfs(tmp_path, GB200))
    assert list(nodes) == [0, 1, 2, 10]
    assert nodes[1].cpus == frozenset(range(72, 144))
    assert nodes[10].cpus == frozenset()
    assert nodes[10].distances == {0: 120, 1: 80, 2: 160, 10: 10}


def test_a_kernel_without_numa_shows_no_nodes(tmp_path):
    assert numa_nodes(tmp_path) == {}
    assert gpu_numa_node(GPU, tmp_path) is None
    assert bind_process("auto", GPU, tmp_path).node is None
    with pytest.raises(ValueError, match="this machine has: none"):
        bind_process(0, None, tmp_path)


CLUSTERS = {0: ("0-3", "10 12 21 21"), 1: ("4-7", "12 10 21 21"), 2: ("8-11", ""), 3: ("12-15", "")}


PLACES = [
    (TWO_SOCKETS, {"numa_node": "1", "local_cpulist": "0-3"}, 1),
    *((TWO_SOCKETS, {"numa_node": node, "local_cpulist": "4-7,12-15"}, 1) for node in ("-1", "7")),  # 7 is no node
    (CLUSTERS, {"numa_node": "-1", "local_cpulist": "2-7"}, 1),  # which has most of these CPUs
    *((TWO_SOCKETS, files, None) for files in ({"numa_node": "-1", "local_cpulist": "0-15"}, {}, None)),
    (GB200, {"numa_node": "2"}, 0),  # the nearest node with CPUs
    ({0: ("0-3", ""), 1: ("4-7", ""), 2: ("", "")}, {"numa_node": "2"}, 0),
]


@pytest.mark.parametrize(("nodes", "files", "node"), PLACES)
def test_a_gpus_node_is_the_kernels_or_that_of_its_local_cpus(tmp_path, nodes, files, node):
    assert gpu_numa_node(GPU, make_sysfs(tmp_path, nodes, {} if files is None else {GPU: files})) == node


def test_an_address_is_found_however_it_is_spelled(tmp_path):
    sysfs = make_sysfs(tmp_path, TWO_SOCKETS, {GPU: {"numa_node": "1"}})
    assert {gpu_numa_node(spelling, sysfs) for spelling in (GPU, "00000000:65:00.0", "65:00.0")} == {1}
    assert numa.normalize_pci_bus_id("00000000:A1:0F.1") == "0000:a1:0f.1"
    assert numa.normalize_pci_bus_id("00010000:06:00.0") == "10000:06:00.0"
    for text in ["", "GPU-1", "0000:65:00", "0000:65:00.9"]:
        with pytest.raises(ValueError, match="is not a PCI address"):
            numa.normalize_pci_bus_id(text)


def test_one_socket(tmp_path):
    sysfs = make_sysfs(tmp_path, {0: ("0-15", "10")}, {GPU: {"numa_node": "-1", "local_cpulist": "0-15"}})
    assert gpu_numa_node(GPU, sysfs) == 0
    binding = bind_process("auto", GPU, sysfs)
    assert (binding.node, binding.memory_preferred) == (None, False)
    assert "the machine has fewer than two NUMA nodes with CPUs" in binding.note
    assert set(binding.cpus) == os.sched_getaffinity(0)


def test_cpu_lists_are_read_and_written():
    assert numa.parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numa.parse_cpu_list("") == frozenset()
    for text in ["", "5", "0-3,8,10-11", "0,2,4"]:
        assert format_cpu_list(numa.parse_cpu_list(text)) == text


def test_nothing_is_bound_that_need_not_be(tmp_path):
    sysfs = make_sysfs(tmp_path, TWO_SOCKETS, {GPU: {"numa_node": "-1", "local_cpulist": "0-15"}})
    before = os.sched_getaffinity(0)
    assert "policy.numa is none" in bind_process("none", GPU, sysfs).note
    assert "this process has no GPU" in bind_process("auto", None, sysfs).note
    assert f"the kernel reports no NUMA node for GPU {GPU}" in bind_process("auto", GPU, sysfs).note
    assert os.sched_getaffinity(0) == before


NO_NODES = [(3, "with CPUs; .* has: 0, 1"), (-1, ""), ("Auto", ""), (2, "without CPUs")]


@pytest.mark.parametrize(("setting", "words"), NO_NODES)
def test_a_setting_that_is_no_node_is_an_error(tmp_path, setting, words):
    with pytest.raises(ValueError, match=rf"policy\.numa is {setting!r}.*{words}"):
        bind_process(setting, GPU, make_sysfs(tmp_path, GB200))


def two_halves(root: Path) -> tuple[Path, int, int]:
    """Writes a sysfs whose nodes 0 and 1 share the CPUs that this test may use; returns it and a CPU of each."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    halves = set(cpus[::2]) | {10_000}, set(cpus[1::2]) | {10_001}
    nodes = {number: (format_cpu_list(half), "10 21") for number, half in enumerate(halves)}
    return make_sysfs(root, nodes, {GPU: {"numa_node": "0"}}), cpus[0], cpus[1]


BIND = """
import json, os, sys, threading
from pathlib import Path
from nemo_offload_rl.memory.numa import bind_process

stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
binding = bind_process("auto", "00000000:65:00.0", Path(sys.argv[1]))
threads = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
stop.set()
maps = Path("/proc/self/numa_maps")
policies = [line.split()[1] for line in maps.read_text().splitlines()] if maps.exists() else None
print(json.dumps([binding.node, binding.cpus, binding.memory_preferred, binding.note, threads, policies]))
"""


def test_every_thread_is_bound_and_the_memory_preferred(tmp_path):
    """It really binds, so in a process of its own: an unprivileged process cannot undo a binding."""
    sysfs, first, second = two_halves(tmp_path)
    done = subprocess.run([sys.executable, "-c", BIND, str(sysfs)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    node, cpus, is_preferred, note, threads, policies = json.loads(done.stdout)
    half = sorted(os.sched_getaffinity(0))[::2]
    assert first in half
    assert second not in half
    assert (node, cpus) == (0, half)  # this process may not use the node's CPU 10000
    assert threads == [half] * 2
    if not is_preferred:
        pytest.skip(f"set_mempolicy is denied here: {note}")
    assert done.stderr == ""
    assert note.endswith(f"CPUs {format_cpu_list(set(half))}; memory preferred from it")
    assert policies is None or "prefer:0" in policies


def test_a_mapping_is_preferred_on_its_node_and_a_node_that_is_not_there_is_a_warning_once(caplog):
    numa._warn_once.cache_clear()
    mapping = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    took = prefer_node(address, 1 << 20, 0)
    mapping[:] = bytes(1 << 20)
    maps = Path("/proc/self/numa_maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    assert not any(prefer_node(address, 1 << 20, 900) for _ in range(3))
    assert caplog.text.count("mbind failed: ") == (1 if took else 2)
    for line in (line for line in lines if took and int(line.split()[0], 16) == address):
        assert " prefer:0 " in line and " N0=256" in line


@pytest.fixture
def denied(monkeypatch):
    """Returns what lets calls fail that bind threads and memory, as a container's seccomp profile does."""

    def deny(error):
        def sched_setaffinity(thread, cpus):
            raise OSError(error, os.strerror(error))

        def syscall(*_):
            ctypes.set_errno(error)
            return -1

        monkeypatch.setattr(os, "sched_setaffinity", sched_setaffinity)
        monkeypatch.setattr(numa, "_libc", SimpleNamespace(syscall=syscall))

    return deny


DENIED = "Operation not permitted (in a container, --cap-add SYS_NICE allows it)"


@pytest.mark.parametrize(("error", "words"), [(errno.EPERM, DENIED), (errno.ENOSYS, "Function not implemented")])
def test_what_a_container_denies_is_a_warning(tmp_path, denied, caplog, error, words):
    denied(error)
    binding = bind_process("auto", GPU, two_halves(tmp_path)[0])
    assert not prefer_node(0, 4096, 0)
    assert (binding.node, set(binding.cpus), binding.memory_preferred) == (0, os.sched_getaffinity(0), False)
    assert f"CPUs unchanged, sched_setaffinity failed: {words}" in binding.note
    cpus, memory, mapping = caplog.messages
    assert cpus.startswith("NUMA node 0: CPUs unchanged")
    assert memory.startswith(f"NUMA node 0: set_mempolicy failed: {words}")
    assert mapping.startswith(f"mbind failed: {words}")


def test_a_node_whose_cpus_are_not_this_process_s_keeps_the_cpus_and_says_so(tmp_path, denied, caplog):
    denied(errno.EPERM)
    sysfs = make_sysfs(tmp_path, {0: ("10000-10003", "10 21"), 1: ("0-1", "21 10")}, {GPU: {"numa_node": "0"}})
    binding = bind_process("auto", GPU, sysfs)
    assert set(binding.cpus) == os.sched_getaffinity(0)
    assert "the node's CPUs (10000-10003) are not among those of this process" in binding.note
    assert "NUMA node 0: CPUs unchanged" in caplog.text
