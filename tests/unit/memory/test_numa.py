import json
import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nemo_offload_rl.memory.numa import (
    bind_process,
    format_cpu_list,
    gpu_numa_node,
    normalize_pci_bus_id,
    numa_nodes,
    parse_cpu_list,
)

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
GB200 = {
    0: ("0-71", "10 40 80 120"),
    1: ("72-143", "40 10 120 80"),
    2: ("", "80 120 10 160"),
    10: ("", "120 80 160 10"),
}


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


@pytest.mark.parametrize(
    ("nodes", "files", "node"),
    [
        (TWO_SOCKETS, {"numa_node": "1", "local_cpulist": "0-3"}, 1),
        (TWO_SOCKETS, {"numa_node": "-1", "local_cpulist": "4-7,12-15"}, 1),
        (TWO_SOCKETS, {"numa_node": "7", "local_cpulist": "4-7,12-15"}, 1),  # there is no such node
        (CLUSTERS, {"numa_node": "-1", "local_cpulist": "2-7"}, 1),  # which has most of these CPUs
        (TWO_SOCKETS, {"numa_node": "-1", "local_cpulist": "0-15"}, None),
        (TWO_SOCKETS, {}, None),
        (TWO_SOCKETS, None, None),  # the GPU is not in sysfs
        (GB200, {"numa_node": "2"}, 0),  # the nearest node with CPUs
        ({0: ("0-3", ""), 1: ("4-7", ""), 2: ("", "")}, {"numa_node": "2"}, 0),
    ],
)
def test_a_gpus_node_is_the_kernels_or_that_of_its_local_cpus(tmp_path, nodes, files, node):
    assert gpu_numa_node(GPU, make_sysfs(tmp_path, nodes, {} if files is None else {GPU: files})) == node


def test_an_address_is_found_however_it_is_spelled(tmp_path):
    sysfs = make_sysfs(tmp_path, TWO_SOCKETS, {GPU: {"numa_node": "1"}})
    assert {gpu_numa_node(spelling, sysfs) for spelling in (GPU, "00000000:65:00.0", "65:00.0")} == {1}
    assert normalize_pci_bus_id("00000000:A1:0F.1") == "0000:a1:0f.1"
    assert normalize_pci_bus_id("00010000:06:00.0") == "10000:06:00.0"
    for text in ["", "GPU-1", "0000:65:00", "0000:65:00.9"]:
        with pytest.raises(ValueError, match="is not a PCI address"):
            normalize_pci_bus_id(text)


def test_one_socket(tmp_path):
    sysfs = make_sysfs(tmp_path, {0: ("0-15", "10")}, {GPU: {"numa_node": "-1", "local_cpulist": "0-15"}})
    assert gpu_numa_node(GPU, sysfs) == 0
    binding = bind_process("auto", GPU, sysfs)
    assert (binding.node, binding.memory_preferred) == (None, False)
    assert "the machine has fewer than two NUMA nodes with CPUs" in binding.note
    assert set(binding.cpus) == os.sched_getaffinity(0)


def test_cpu_lists_are_read_and_written():
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("") == frozenset()
    for text in ["", "5", "0-3,8,10-11", "0,2,4"]:
        assert format_cpu_list(parse_cpu_list(text)) == text


def test_nothing_is_bound_that_need_not_be(tmp_path):
    sysfs = make_sysfs(tmp_path, TWO_SOCKETS, {GPU: {"numa_node": "-1", "local_cpulist": "0-15"}})
    before = os.sched_getaffinity(0)
    for setting, gpu, words in (
        ("none", GPU, "policy.numa is none"),
        ("auto", None, "this process has no GPU"),
        ("auto", GPU, f"the kernel reports no NUMA node for GPU {GPU}"),
    ):
        assert words in bind_process(setting, gpu, sysfs).note
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("setting", "words"), [(3, "with CPUs; .* has: 0, 1"), (-1, ""), ("Auto", ""), (2, "without CPUs")]
)
def test_a_setting_that_is_no_node_is_an_error(tmp_path, setting, words):
    with pytest.raises(ValueError, match=rf"policy\.numa is {setting!r}.*{words}"):
        bind_process(setting, GPU, make_sysfs(tmp_path, GB200))


# These tests really bind, each in its own process: an unprivileged process cannot undo a binding.


def in_a_process(code: str, *arguments: str) -> dict:
    """Runs code that sets `result`, a mapping, in a new process; returns it, with the log under "log"."""
    preamble = """
        import json, logging, os, sys, threading, io
        from pathlib import Path
        from nemo_offload_rl.memory.numa import bind_process, prefer_node
        log = io.StringIO()
        logging.basicConfig(stream=log, format="%(levelname)s %(message)s")
    """
    source = "\n".join(map(textwrap.dedent, (preamble, code, "print(json.dumps({**result, 'log': log.getvalue()}))")))
    done = subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def two_halves(root: Path) -> tuple[Path, int, int]:
    """Writes a sysfs whose nodes 0 and 1 share the CPUs that this test may use; returns it and a CPU of each."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    halves = set(cpus[::2]) | {10_000}, set(cpus[1::2]) | {10_001}
    nodes = {number: (format_cpu_list(half), "10 21") for number, half in enumerate(halves)}
    return make_sysfs(root, nodes, {GPU: {"numa_node": "0"}}), cpus[0], cpus[1]


def test_every_thread_is_bound_and_the_memory_preferred(tmp_path):
    sysfs, first, second = two_halves(tmp_path)
    result = in_a_process(
        """
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        binding = bind_process("auto", "00000000:65:00.0", Path(sys.argv[1]))
        threads = {int(task): sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
        stop.set()
        policies = {line.split()[1] for line in open("/proc/self/numa_maps")} if os.path.exists(
            "/proc/self/numa_maps") else None
        result = dict(node=binding.node, cpus=binding.cpus, preferred=binding.memory_preferred, note=binding.note,
                      threads=threads, policies=sorted(policies) if policies else None)
        """,
        str(sysfs),
    )
    half = sorted(os.sched_getaffinity(0))[::2]
    assert first in half
    assert second not in half
    assert (result["node"], result["cpus"]) == (0, half)  # this process may not use the node's CPU 10000
    assert len(result["threads"]) == 2
    assert all(cpus == half for cpus in result["threads"].values())
    if not result["preferred"]:
        pytest.skip(f"set_mempolicy is denied here: {result['note']}")
    assert result["log"] == ""
    assert result["note"].endswith(f"CPUs {format_cpu_list(set(half))}; memory preferred from it")
    if result["policies"] is not None:
        assert "prefer:0" in result["policies"]


def test_a_node_whose_cpus_are_not_this_process_s_keeps_the_cpus_and_says_so(tmp_path):
    sysfs = make_sysfs(tmp_path, {0: ("10000-10003", "10 21"), 1: ("0-1", "21 10")}, {GPU: {"numa_node": "0"}})
    before = sorted(os.sched_getaffinity(0))
    code = f'binding = bind_process("auto", "{GPU}", Path(sys.argv[1]))'
    result = in_a_process(f"{code}\nresult = dict(cpus=binding.cpus, note=binding.note)", str(sysfs))
    assert result["cpus"] == before
    assert "CPUs unchanged, because the node's CPUs (10000-10003) are not among those of this process" in result["note"]
    assert "WARNING NUMA node 0: CPUs unchanged" in result["log"]


def test_a_mapping_is_preferred_on_its_node_and_a_node_that_is_not_there_is_a_warning_once():
    result = in_a_process(
        """
        import ctypes, mmap
        mapping = mmap.mmap(-1, 1 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        took = prefer_node(address, 1 << 20, 0)
        mapping[:] = bytes(1 << 20)
        maps = open("/proc/self/numa_maps").read() if os.path.exists("/proc/self/numa_maps") else ""
        lines = [line for line in maps.splitlines() if int(line.split()[0], 16) == address]
        result = dict(took=took, lines=lines, far=[prefer_node(address, 1 << 20, 900) for _ in range(3)])
        """
    )
    assert result["far"] == [False] * 3
    assert result["log"].count("WARNING mbind failed: ") == 1
    if not result["took"]:
        pytest.skip(f"mbind is denied here: {result['log']}")
    if result["lines"]:
        assert " prefer:0 " in result["lines"][0]
        assert " N0=256" in result["lines"][0]


# Makes the numbered system calls fail with an errno, as a container's seccomp profile does.
DENY = """
import ctypes, struct

def deny(error, *numbers):
    load, equal, give = 0x20, 0x15, 0x06  # BPF: load a word, jump if equal, return
    code = struct.pack("HBBI", load, 0, 0, 0)
    for number in numbers:
        code += struct.pack("HBBI", equal, 0, 1, number) + struct.pack("HBBI", give, 0, 0, 0x00050000 | error)
    code += struct.pack("HBBI", give, 0, 0, 0x7FFF0000)
    filters = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    if libc.prctl(22, 2, program) != 0:
        print(json.dumps({"denied": False}))
        raise SystemExit
"""
CALLS = {"x86_64": (203, 237, 238), "aarch64": (122, 235, 237)}


@pytest.mark.skipif(platform.machine() not in CALLS, reason="numbers of the calls are those of other processors")
@pytest.mark.parametrize(
    ("error", "words"),
    [(1, "Operation not permitted (in a container, --cap-add SYS_NICE allows it)"), (38, "Function not implemented")],
)
def test_what_a_container_denies_is_a_warning(tmp_path, error, words):
    sysfs, _, _ = two_halves(tmp_path)
    result = in_a_process(
        DENY
        + textwrap.dedent(f"""
        import mmap
        deny({error}, *{CALLS[platform.machine()]})
        binding = bind_process("auto", "{GPU}", Path(sys.argv[1]))
        mapping = mmap.mmap(-1, 4096)
        took = prefer_node(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), 4096, 0)
        result = dict(denied=True, node=binding.node, cpus=binding.cpus, preferred=binding.memory_preferred,
                      note=binding.note, took=took)
        """),
        str(sysfs),
    )
    if not result["denied"]:
        pytest.skip("seccomp filters are not allowed here")
    assert (result["node"], result["cpus"]) == (0, sorted(os.sched_getaffinity(0)))
    assert (result["preferred"], result["took"]) == (False, False)
    assert f"CPUs unchanged, sched_setaffinity failed: {words}" in result["note"]
    assert f"WARNING NUMA node 0: set_mempolicy failed: {words}" in result["log"]
    assert f"WARNING mbind failed: {words}" in result["log"]
    assert result["log"].count("WARNING") == 3
