"""Tests that the driver says so, and ends, when Ray's GCS is gone."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ray._common.network_utils import build_address

from nemo_offload_rl.placement.local_ray import GcsWatch
from nemo_offload_rl.run.failures import gcs_failure
from nemo_offload_rl.run.interrupt import Progress


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
    with subprocess.Popen(
        [sys.executable, "-c", RUN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        address, pid = run.stdout.readline().split()
        os.kill(int(pid), signal.SIGKILL)
        start_s = time.monotonic()
        _, errors = run.communicate(timeout=100)
    assert run.returncode == 1
    assert errors.splitlines()[-1] == f"gone: {address}"
    assert time.monotonic() - start_s < 30
