"""Works around Ray's behaviour on this machine, joins the cluster of RAY_ADDRESS, and ends the driver with the GCS."""

from __future__ import annotations

import contextlib
import errno
import getpass
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import auto_init_hook
from ray._private.services import canonicalize_bootstrap_address

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.nodes import answers_at
from nemo_offload_rl.placement.signals import ENDING_SIGNALS
from nemo_offload_rl.storage.disk import require_writable

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES_WITHOUT_GPU = 1 * GIB
_MIN_SHARED_MEMORY_BYTES = 256 << 20


def complete_environment() -> None:
    """Gives torch a user's name and Ray a token where the system knows no such user, as in containers with any uid.

    torch names a folder after the user; Ray keeps its token in the user's home, if that can be written.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid{os.getuid()}"
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() and not _home_keeps_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _home_keeps_token() -> bool:
    try:
        folder = Path.home() / ".ray"
    except RuntimeError:
        return False
    return os.path.exists(folder / "auth_token") or os.access(
        folder if os.path.exists(folder) else folder.parent, os.W_OK
    )


def object_store_options(has_gpus: bool) -> dict[str, Any]:
    """Returns the options for Ray's object store: Ray's default size (30% of memory) with GPUs, otherwise a small one.

    The small store goes to a temporary folder if /dev/shm has too little space.
    """
    if has_gpus:
        return {}
    free = shutil.disk_usage("/dev/shm").free
    if free < _MIN_SHARED_MEMORY_BYTES:
        folder = tempfile.gettempdir()
        logger.warning(
            "/dev/shm has only %d MiB free: Ray's object store goes to %s, which is slower.", free >> 20, folder
        )
        return {"object_store_memory": _OBJECT_STORE_BYTES_WITHOUT_GPU, "_plasma_directory": folder}
    return {"object_store_memory": min(_OBJECT_STORE_BYTES_WITHOUT_GPU, int(0.8 * free))}


_SHORT_ROOT = "/tmp/ray"
_MAX_SOCKET_PATH_BYTES = 107


def session_root() -> str:
    """Returns the folder for Ray's session folders: Ray's own choice (RAY_TMPDIR, TMPDIR or /tmp) if it can be used.

    Batch systems set TMPDIR to long paths, in which Ray cannot make its sockets, and to folders that a container lacks.
    """
    root = get_default_ray_temp_dir()
    in_root = f"/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    room = _MAX_SOCKET_PATH_BYTES - len(in_root) - len("/ray")
    if not os.path.isabs(root):
        reason = "Ray takes an absolute path"
    elif len(os.fsencode(root)) > room + len("/ray"):
        reason = f"paths of sockets allow {room} characters"
    else:
        try:
            require_writable(Path(root))
            return root
        except ValueError as error:
            reason = str(error).partition("; ")[0]
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    logger.warning("Ray's files go to %s, not to %s (%s): %s.", _SHORT_ROOT, Path(root).parent, name, reason)
    return _SHORT_ROOT


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Restores this process's signal handlers after the `with` block, since Ray's would end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # outside the main thread Ray sets no handlers
        return
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not set by Python, which cannot restore it
                signal.signal(number, handler)


def disconnect_and_kill() -> None:
    """Disconnects from Ray and kills its processes; ray.shutdown() alone waits a second for each after SIGTERM.

    A thread that then still calls Ray gets an error; by default Ray would start on this machine again.
    """
    auto_init_hook.enable_auto_connect = False
    node = ray._private.worker._global_node
    if node is not None:
        kill_all_processes = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill_all_processes(**options | {"allow_graceful": False})
    ray.shutdown()


_PERIOD_S = 2.0
_CONNECT_TIMEOUT_S = 5.0
# Without a free file descriptor, port or buffer here, a connection says nothing about the GCS.
_OWN_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})


class GcsWatch:
    """Checks periodically, inside its `with` block, in a thread, whether the GCS takes connections.

    A GCS that is only slow takes them, too: the kernel does it. Ray does not give up on it either.

    Without the GCS Ray aborts the process after a minute, from C++: no error reaches Python, and calls into Ray may
    hang meanwhile, a few of them with the interpreter's lock, so that this thread cannot run either. So this ends the
    process, too, but sooner, and says why. The reaper then ends Ray's processes.

    Args:
        address: host and port of the GCS.
        message: returns what to say.
        patience_s: seconds without a connection after which the GCS is gone.
        period_s: seconds between checks.
        end: called with the message; does not return in a run.
    """

    def __init__(
        self,
        address: str,
        message: Callable[[], str],
        *,
        patience_s: float,
        period_s: float = _PERIOD_S,
        end: Callable[[str], None] | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)  # an IPv6 host has brackets
        self._message = message
        self._patience_s = patience_s
        self._period_s = period_s
        self._end_process = _end if end is None else end
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gcs-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()

    def _run(self) -> None:
        connected_s = time.monotonic()
        while not self._end.wait(self._period_s):
            start_s = time.monotonic()
            if self._connects():
                connected_s = start_s
            elif time.monotonic() - connected_s >= self._patience_s and not self._end.is_set():
                self._end_process(self._message())
                return

    def _connects(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return error.errno in _OWN_SHORTAGES
        return True


def _end(message: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"{message}\n".encode())
    os._exit(1)


_ANSWER_TIMEOUT_S = 10.0
_NOT_HEADS = ("auto", "local", "")
_HOW = "it has to be the HOST:PORT that `ray start --head` prints (port 6379 unless it was given another), or auto"
_REMEDY = "correct RAY_ADDRESS, or unset it to run on this machine alone"


def join_ray(options: Mapping[str, Any]) -> None:
    """Connects to the Ray cluster that RAY_ADDRESS names.

    Ray itself would try for two minutes to reach a head that does not answer, and then end the process.

    Args:
        options: arguments of `ray.init`.

    Raises:
        ValueError: RAY_ADDRESS is no address of a head, or no head answers there.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    _require_head(address)
    try:
        ray.init(**options)
    except ConnectionError as error:
        before, _, trace = str(error.__cause__ or error).partition("Traceback (most recent call last):")
        reason = " ".join([*before.split(), *trace.strip().splitlines()[-1:]])
        raise ValueError(f"RAY_ADDRESS is {address}, but Ray cannot join that cluster: {reason}; {_REMEDY}.") from error


def _require_head(address: str) -> None:
    if "://" in address:
        raise ValueError(
            f"RAY_ADDRESS is {address}, but a run joins Ray as a driver, not through Ray Client (ray://) or the job "
            f"server (http://): {_HOW}."
        )
    host, _, port = address.rpartition(":")
    if address not in _NOT_HEADS and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"RAY_ADDRESS is {address}, which names no head of a Ray cluster: {_HOW}.")
    try:
        found = canonicalize_bootstrap_address(None)  # as ray.init reads RAY_ADDRESS
    except ConnectionError as error:
        raise ValueError(f"RAY_ADDRESS is {address}, but no Ray runs on this machine; start one, {_REMEDY}.") from error
    if found is None:  # ray.init starts Ray here
        return
    host, _, port = found.rpartition(":")
    if not answers_at(host.strip("[]"), int(port), _ANSWER_TIMEOUT_S):
        meant = "" if found == address else f", which stands for {found}"
        raise ValueError(
            f"RAY_ADDRESS is {address}{meant}, but no head of a Ray cluster answers there within "
            f"{_ANSWER_TIMEOUT_S:.0f} s; start it with `ray start --head --port={port}`, {_REMEDY}."
        )
