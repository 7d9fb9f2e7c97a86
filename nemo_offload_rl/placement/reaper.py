"""Kills the Ray processes that a driver leaves behind, even if the driver itself was killed.

Ray's own processes die with the driver, but their children do not: agents notice the driver's death a minute later, and
a worker that is still importing only after its imports. So a small separate process, which needs only the standard
library, waits for the driver's end, kills the remaining processes, and deletes Ray's session folder. It finds them by
an environment variable that the driver sets and every process started by Ray inherits; agents overwrite their
environment with a process title, and are found by the files that they write in Ray's session folder.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

MARK = "NEMO_OFFLOAD_RL_DRIVER"
"""Name of the environment variable that marks the processes of a driver's Ray."""

_KEEP = b"keep"
_CHECK_PERIOD_S = 1.0
_KILL_TIMEOUT_S = 60.0
_FINISH_TIMEOUT_S = 15.0
_NUM_LOOKS = 3

logger = logging.getLogger(__name__)


class Reaper:
    """Starts the process that kills the remaining Ray processes, and is the driver's handle on it.

    Args:
        session_root: the folder in which Ray makes its session folders.
    """

    def __init__(self, session_root: str) -> None:
        mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        pattern = f"session_*_{os.getpid()}"  # an earlier process with the same id may have left such folders
        others = [str(path) for path in Path(session_root).glob(pattern)]
        arguments = [f"{MARK}={mark}", str(os.getpid()), session_root, pattern, *others]
        # -I and -S: starts in 20 ms, whatever the user's environment is. It does not inherit stdout, so that a pipe
        # that reads the driver's output ends with the driver.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != MARK},
            start_new_session=True,
        )
        os.environ[MARK] = mark

    def finish(self, *, keep_logs: bool) -> None:
        """Kills the remaining processes and waits for their end, but not long: a hanging disk can block their exit.

        Args:
            keep_logs: whether to keep Ray's session folder, with the output of its processes.
        """
        os.environ.pop(MARK, None)
        try:
            self._process.communicate(_KEEP if keep_logs else b"", timeout=_FINISH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("Some of Ray's processes have not ended within %.0f s of SIGKILL.", _FINISH_TIMEOUT_S)


def _wait_for_driver(driver: int) -> bytes:
    """Waits until the driver closes its end of the pipe, or has ended while one of its children holds that end open.

    Returns:
        The bytes that the driver has written.
    """
    received = b""
    while os.getppid() == driver:
        readable, _, _ = select.select([0], [], [], _CHECK_PERIOD_S)
        if readable:
            chunk = os.read(0, 1024)
            if not chunk:
                break
            received += chunk
    return received


def _kill_left(driver: int, mark: str, folders: Sequence[str]) -> None:
    """Kills the processes that a driver has left, but not the driver, until none is found.

    It looks repeatedly, since a process may just have started another. A process that waits for a disk ends only when
    the disk answers.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    num_empty = 0  # consecutive looks that found nothing: a process that is being created has no environment yet
    while num_empty < _NUM_LOOKS and time.monotonic() < deadline:
        num_found = 0
        for pid in _pids() - {driver}:
            descriptor = _open_if_left(pid, mark.encode(), folders)
            if descriptor is None:
                continue
            num_found += 1
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the process has just ended
            finally:
                os.close(descriptor)
        num_empty = 0 if num_found else num_empty + 1
        time.sleep(0.1)


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def _open_if_left(pid: int, mark: bytes, folders: Sequence[str]) -> int | None:
    """Returns a pidfd of a process that the driver's Ray has started; None for other processes.

    With a pidfd, the signal cannot reach another process that gets the same id later.

    Args:
        pid: id of the process.
        mark: the mark in the environment of processes that the driver has started.
        folders: Ray's session folders, in which these processes write their logs.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has ended: ESRCH, or EINVAL where it is just being reaped
        return None
    if _has_mark(pid, mark) or _writes_into(pid, folders):
        return descriptor
    os.close(descriptor)
    return None


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return False


def _writes_into(pid: int, folders: Sequence[str]) -> bool:
    """Returns whether the process has a file of one of the folders open for writing, unlike a reader of a log."""
    try:
        streams = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # another user's, or gone
        return False
    for stream in streams:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{stream}")
            if not any(target.startswith(f"{folder}/") for folder in folders):
                continue
            flags = Path(f"/proc/{pid}/fdinfo/{stream}").read_text().split("flags:")[1].split()[0]
        except OSError:  # closed meanwhile
            continue
        if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
            return True
    return False


def _session_folders(root: Path, pattern: str, others: Sequence[str]) -> list[str]:
    """Returns the folders of a pattern that did not exist when the driver started."""
    return [str(folder) for folder in root.glob(pattern) if str(folder) not in others]


def _delete_sessions(root: Path, folders: Sequence[str]) -> None:
    """Deletes session folders, and the symlink to the latest one if it is dangling."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    latest = root / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def _main(mark: str, driver: str, session_root: str, pattern: str, *others: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    keep_logs = _wait_for_driver(int(driver)) == _KEEP
    folders = _session_folders(Path(session_root), pattern, others)
    _kill_left(int(driver), mark, folders)
    if not keep_logs:
        _delete_sessions(Path(session_root), folders)


if __name__ == "__main__":
    _main(*sys.argv[1:])
