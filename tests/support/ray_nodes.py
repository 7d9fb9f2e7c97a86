"""Starts a Ray cluster of several nodes on this host, each with its own loopback address."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
from support.examples import environment

_BINARIES = Path(sys.executable).parent
_START_TIMEOUT_S = 120


class RayNodes:
    """Starts nodes with `ray start`, as on separate machines, and kills them as a power failure would."""

    def __init__(self, *, with_dashboard: bool, gpus: Mapping[int, int]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray"))  # holds sockets, whose paths may have at most 107 characters
        (self.folder / "token").write_text(secrets.token_hex(32))
        port, dashboard_port = free_port(), free_port()
        self.address, self.dashboard = f"127.0.0.2:{port}", f"http://127.0.0.1:{dashboard_port}"
        self._nodes: dict[int, subprocess.Popen] = {}
        self._gpus = gpus
        self._head = [f"--port={port}", "--head", f"--dashboard-port={dashboard_port}"]
        self._head.append(f"--include-dashboard={str(with_dashboard).lower()}")

    def environment(self) -> dict[str, str]:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "token")}
        # Importing the package has set the first to 0, which is for Ray on loopback alone.
        ray = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        binaries = os.pathsep.join([str(_BINARIES), os.environ["PATH"]])
        own = {"PATH": binaries, "UV_PROJECT_ENVIRONMENT": sys.prefix, "UV_NO_SYNC": "1"}  # for `uv run` in a job
        return environment() | token | ray | own

    def start_head(self) -> None:
        """Starts the node at 127.0.0.2, which the others join."""
        self._start(2, *self._head)

    def start(self, number: int, *options: str) -> None:
        """Starts a node at 127.0.0.NUMBER, and waits until it has joined."""
        self._start(number, f"--address={self.address}", *options)

    def family(self, number: int) -> list[psutil.Process]:
        main = psutil.Process(self._nodes[number].pid)
        return [main, *main.children(recursive=True)]

    def signal(self, number: int, what: signal.Signals) -> None:
        for process in self.family(number):
            process.send_signal(what)

    def remove(self, number: int) -> None:
        for process in self.family(number):
            process.kill()
        self._nodes.pop(number).wait()

    def close(self) -> None:
        for number in sorted(self._nodes, reverse=True):
            self.remove(number)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, number: int, *options: str) -> None:
        output = self.folder / f"node_{number}.txt"
        command = [
            *(
                sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address=127.0.0.{number}",
                "--num-cpus=1", f"--num-gpus={int(number in self._gpus)}",
            ),
            f"--temp-dir={self.folder}/{number}",  # one per node: a node deletes files of jobs that it does not run
            *("--object-store-memory=100000000", "--dashboard-agent-listen-port=0"),
            *("--min-worker-port=0", "--max-worker-port=0", *options),
        ]  # fmt: skip
        with output.open("w") as file:
            visible = {"CUDA_VISIBLE_DEVICES": str(self._gpus[number])} if number in self._gpus else {}
            node = subprocess.Popen(
                command, env=self.environment() | visible, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._nodes[number] = node
        deadline = time.monotonic() + _START_TIMEOUT_S
        while "Ray runtime started" not in output.read_text():
            assert node.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)


@contextmanager
def ray_nodes(*, with_dashboard: bool = False, gpus: Mapping[int, int] = MappingProxyType({})) -> Iterator[RayNodes]:
    """Starts the head node; stops every node when the block ends."""
    nodes = RayNodes(with_dashboard=with_dashboard, gpus=gpus)
    try:
        nodes.start_head()
        yield nodes
    finally:
        nodes.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
