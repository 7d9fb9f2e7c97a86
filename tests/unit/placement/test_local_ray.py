"""Tests how Ray is started on this machine, without starting it."""

import getpass
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._common.network_utils import build_address
from ray._private import auto_init_hook

from nemo_offload_rl.placement import local_ray
from nemo_offload_rl.placement.local_ray import (
    GcsWatch,
    complete_environment,
    handlers_kept,
    join_ray,
    object_store_options,
    session_root,
)
from nemo_offload_rl.placement.signals import ENDING_SIGNALS, ignore_ending_signals
from nemo_offload_rl.run.failures import gcs_failure
from nemo_offload_rl.run.interrupt import Progress

MIB = 2**20


@pytest.mark.parametrize(("free_mib", "store_mib"), [(256, 204), (1024, 819), (2048, 1024)])
def test_the_object_store_leaves_some_shared_memory_to_others(monkeypatch, free_mib, store_mib):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_mib * MIB))
    options = object_store_options(has_gpus=False)
    assert list(options) == ["object_store_memory"]
    assert options["object_store_memory"] // MIB == store_mib
    assert object_store_options(has_gpus=True) == {}  # Ray chooses its size


def test_with_too_little_shared_memory_the_object_store_is_on_the_disk_and_says_so(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 * MIB))  # as in a container
    monkeypatch.setattr(local_ray.tempfile, "gettempdir", lambda: str(tmp_path))
    options = object_store_options(has_gpus=False)
    assert options == {"object_store_memory": 1024 * MIB, "_plasma_directory": str(tmp_path)}
    assert "/dev/shm has only 64 MiB free" in caplog.text


def test_ray_gets_a_short_folder_where_its_own_would_be_too_long_or_cannot_be_used(monkeypatch, caplog):
    session = len(f"/ray/session_2026-11-27_15-03-35_340437_{os.getpid()}/sockets/plasma_store")
    longest = Path("/tmp") / ("x" * (107 - session - len("/tmp/")))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(longest))
    assert session_root() == str(longest / "ray")
    assert caplog.text == ""
    monkeypatch.setenv("TMPDIR", f"{longest}x")
    assert session_root() == "/tmp/ray"
    assert f"not to {longest}x (TMPDIR): paths of sockets allow {107 - session} characters." in caplog.text
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null")
    assert session_root() == "/tmp/ray"
    assert "not to /dev/null (RAY_TMPDIR): the folder /dev/null/ray cannot be used: /dev/null is no fo" in caplog.text
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", "scratch")
    assert session_root() == "/tmp/ray"
    assert "not to scratch (TMPDIR): Ray takes an absolute path." in caplog.text
    monkeypatch.delenv("TMPDIR")
    assert session_root() == "/tmp/ray"


def test_a_user_whom_the_system_does_not_know_has_a_name_for_torch_and_a_token_for_ray(monkeypatch, tmp_path):
    names = ("LOGNAME", "USER", "LNAME", "USERNAME", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    monkeypatch.setattr(os, "environ", environ | {"HOME": str(tmp_path)})
    complete_environment()
    assert os.environ == environ | {"HOME": str(tmp_path)}  # Ray writes its token there

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    del os.environ["HOME"]
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    complete_environment()
    assert getpass.getuser() == f"uid{os.getuid()}"
    assert len(token := os.environ["RAY_AUTH_TOKEN"]) == 64
    complete_environment()
    assert os.environ["RAY_AUTH_TOKEN"] == token


def test_signal_handlers_are_as_before_whatever_was_done_inside():
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}

    def start_ray():
        ignore_ending_signals()
        assert {signal.getsignal(number) for number in ENDING_SIGNALS} == {signal.SIG_IGN}
        raise RuntimeError("Ray did not start")

    with pytest.raises(RuntimeError, match="Ray"), handlers_kept():
        start_ray()
    assert {number: signal.getsignal(number) for number in ENDING_SIGNALS} == before

    def enter_and_leave():
        with handlers_kept():
            pass

    with ThreadPoolExecutor(1) as another:  # another thread has no handlers to keep
        another.submit(enter_and_leave).result()


def test_a_thread_that_still_calls_ray_after_its_end_does_not_start_it_again(monkeypatch):
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)  # Ray's default
    monkeypatch.setattr(ray._private.worker, "_global_node", None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    local_ray.disconnect_and_kill()
    started = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda: started.append("Ray"))
    auto_init_hook.auto_init_ray()  # what `ray.wait` and `remote` begin with
    assert started == []


@pytest.fixture
def joined(monkeypatch):
    """Records the arguments of `ray.init`, which does nothing, and the addresses that are asked for an answer."""
    calls: list[object] = []
    monkeypatch.setattr("ray.init", lambda **options: calls.append(options))
    monkeypatch.setattr(
        "nemo_offload_rl.placement.local_ray.answers_at", lambda host, port, timeout: not calls.append((host, port))
    )
    return calls


ADDRESSES = [
    ("10.0.0.1:6379", [("10.0.0.1", 6379)]),
    ("head:7000", [("head", 7000)]),
    ("[fd00::1]:6379", [("fd00::1", 6379)]),
    ("local", []),  # starts Ray
]


@pytest.mark.parametrize(("address", "asked"), ADDRESSES)
def test_the_head_is_asked_for_an_answer_before_ray_joins(address, asked, joined, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    join_ray({"log_to_driver": False})
    assert joined == [*asked, {"log_to_driver": False}]


def refused(match):
    with pytest.raises(ValueError, match=match):
        join_ray({})


def test_auto_without_a_ray_on_this_machine_is_one_sentence(joined, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    refused(r"^RAY_ADDRESS is auto, but no Ray runs on this machine; start one, correct")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    monkeypatch.setattr("nemo_offload_rl.placement.local_ray.answers_at", lambda *arguments: False)
    refused(r"is auto, which stands for 10.0.0.1:6379, but no head .* answers there")
    assert joined == []


@pytest.mark.parametrize("address", [":6379", "head:port", "head:99999", "6379"])
def test_what_is_no_address_is_one_sentence(address, joined, monkeypatch, caplog):
    monkeypatch.setenv("RAY_ADDRESS", address)
    refused(f"^RAY_ADDRESS is {address}, which names no head of a Ray cluster: ")
    assert joined == [] and caplog.records == []


def test_a_head_that_refuses_is_one_sentence(joined, monkeypatch):
    def refuse(**options):
        raise ConnectionError("Failed to connect") from RuntimeError("no\ntoken")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("ray.init", refuse)
    refused(r"^RAY_ADDRESS is 10.0.0.1:6379, but Ray cannot join .*: no token; correct")
    trace = 'Traceback (most recent call last):\n  File "node.py", line 996\nray.RpcError: status: 404\n'

    def answer_otherwise(**options):
        raise ConnectionError(f"Failed to connect to GCS. Last connection error: {trace}")

    monkeypatch.setattr("ray.init", answer_otherwise)
    refused(r"cannot join that cluster: .* Last connection error: ray.RpcError: status: 404; correct")


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def address_of(server):
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_gcs_that_is_gone_ends_the_process_once(server):
    said, ended = [], threading.Event()

    def end(message):
        said.append((message, time.monotonic()))
        ended.set()

    with GcsWatch(address_of(server), lambda: "gone", patience_s=0.3, period_s=0.05, end=end):
        assert not ended.wait(0.6)  # nobody accepts, but the kernel does, as for a process that is busy
        closed_s = time.monotonic()
        server.close()
        assert ended.wait(5)
        time.sleep(0.2)
    [(message, at_s)] = said
    assert message == "gone"
    assert at_s - closed_s >= 0.2


def test_a_gcs_with_an_ipv6_address_is_found_and_one_that_is_stopped_after_the_run_is_no_failure():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    said = []
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
        address = build_address("::1", listening.getsockname()[1])
        with GcsWatch(address, lambda: "gone", patience_s=0.05, period_s=0.05, end=said.append):
            time.sleep(0.4)
    time.sleep(0.2)
    assert said == []


def test_a_driver_that_has_no_free_file_goes_on(server):
    said, held = [], []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with GcsWatch(address_of(server), lambda: "gone", patience_s=0.05, period_s=0.05, end=said.append):
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(200))
            time.sleep(0.4)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for file in held:
                os.close(file)
    assert said == []


def test_the_message_names_what_died_what_is_lost_and_the_checkpoint():
    progress = Progress(num_done=7, in_step=True, num_saved=5, checkpoint=Path("ckpts/step_5"))
    message = gcs_failure("10.0.0.1:6379", progress)
    for words in ("Ray's GCS", "10.0.0.1:6379", "Steps 6 to 8", "lost", "resumes from ckpts/step_5"):
        assert words in message


RUN = """
import sys, time, ray
from ray._private import worker
from nemo_offload_rl.placement import cluster
cluster._GCS_PATIENCE_S = 1.0
class Sleeper:
    def sleep(self, seconds):
        time.sleep(seconds)
with cluster.Cluster(num_nodes=1, gpus_per_node=1) as started:
    with started.gcs_watch(lambda address: f"gone: {address}"):
        actor = ray.remote(num_cpus=0)(Sleeper).remote()
        ray.get(actor.sleep.remote(0))
        print(ray.get_runtime_context().gcs_address, worker._global_node.all_processes["gcs_server"][0].process.pid)
        sys.stdout.flush()
        ray.get(actor.sleep.remote(600))
"""


@pytest.mark.slow
def test_a_run_whose_gcs_is_killed_ends_with_the_message():
    command = [sys.executable, "-c", RUN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        address, pid = run.stdout.readline().split()
        os.kill(int(pid), signal.SIGKILL)
        start_s = time.monotonic()
        _, errors = run.communicate(timeout=100)
    assert run.returncode == 1
    assert errors.splitlines()[-1] == f"gone: {address}"
    assert time.monotonic() - start_s < 30
