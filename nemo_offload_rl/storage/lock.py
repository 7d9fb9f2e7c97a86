"""Locks a folder for one run at a time, with a lock file that its process holds and that names the process.

The lock is a flock, which the operating system releases when the process ends, however it ends. The file names its
owner for the error message of a second run, and for file systems whose flock does not reach other hosts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

LOCK_FILE = ".lock"

# Errors of flock on file systems without it; there the process that creates the file (O_EXCL) has the lock.
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# Time within which a process writes its name into the file after it has taken the lock.
_NAMED_AFTER_S = 0.5


class LockedError(ValueError):
    """Says that another run holds the folder, or that it cannot be locked, in one sentence for the user."""


@dataclass(frozen=True)
class Owner:
    """Names the process that holds a lock.

    Attributes:
        host: name of its machine.
        pid: its process id, which a later process may get again.
        boot: the machine's boot id.
        start_ticks: when the process started, in clock ticks since boot; distinguishes it from a later process with the
            same id.
        since: when the process took the lock, in local time.
    """

    host: str
    pid: int
    boot: str
    start_ticks: int
    since: str

    @classmethod
    def this_process(cls) -> Self:
        """Returns the calling process."""
        pid = os.getpid()
        start_ticks = _start_ticks(pid)
        assert start_ticks is not None
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        return cls(socket.gethostname(), pid, _boot_id(), start_ticks, since)

    @property
    def is_of_this_host(self) -> bool:
        """Whether the process is on this host, so that `is_alive` can be determined."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running; only valid if `is_of_this_host`."""
        return self.boot == _boot_id() and _start_ticks(self.pid) == self.start_ticks

    def __str__(self) -> str:
        return f"process {self.pid} of host {self.host} (since {self.since})"


class FolderLock:
    """Locks a folder against other runs, inside its `with` block or until `release`.

    Args:
        folder: the folder; made where it is missing, and then removed on release if it is empty.
        what: the folder's name for the user, such as checkpointing.checkpoint_dir.
        is_beside: whether the lock file is next to the folder instead of in it, so that the folder may be removed and
            made again under the lock.

    Attributes:
        taken_over_from: the dead process that left the lock file; None without one.
    """

    def __init__(self, folder: Path, what: str, *, is_beside: bool = False) -> None:
        self._folder = folder
        self._path = folder.with_name(f".{folder.name}{LOCK_FILE}") if is_beside else folder / LOCK_FILE
        self._what = what
        self._descriptor: int | None = None
        self._made: list[Path] = []
        self.taken_over_from: Owner | None = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    @property
    def notice(self) -> str | None:
        """A line for the user about a lock that was taken over; None if none was."""
        if self.taken_over_from is None:
            return None
        return f"Taking over the lock {self._path}: its owner, {self.taken_over_from}, has ended."

    def acquire(self) -> None:
        """Takes the lock without waiting for it.

        Raises:
            LockedError: another process holds it, or may hold it; or the folder cannot be written.
        """
        try:
            self._make_folder()
            while not self._try():
                pass
        except OSError as error:
            self._remove_made()
            raise LockedError(f"{self._what}: the folder {self._folder} cannot be used: {error.strerror}") from error

    def release(self) -> None:
        """Releases the lock; does nothing if it is not held."""
        if self._descriptor is None:
            return
        # The file is removed while the lock is still held: a process that opens the path from now on makes a new one.
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
        self._remove_made()

    def _try(self) -> bool:
        """Takes the lock; returns False if its previous owner has removed the file meanwhile."""
        try:
            descriptor, is_made_here = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            try:
                descriptor, is_made_here = os.open(self._path, os.O_RDWR), False
            except FileNotFoundError:
                return False
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockedError(self._in_use(self._wait_for_name(descriptor))) from None
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise
                if not is_made_here:
                    raise LockedError(self._without_flock(_read_owner(descriptor))) from error
            if not self._is_at_path(descriptor):
                return False
            before = _read_owner(descriptor)
            if before is not None:
                self._require_dead(before)
            self._sign(descriptor)
            self.taken_over_from = before
            self._descriptor, descriptor = descriptor, -1
            return True
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _require_dead(self, owner: Owner) -> None:
        if not owner.is_of_this_host:
            raise LockedError(
                f"{self._what}: {self._folder} is locked by {owner}, and host {socket.gethostname()} cannot see "
                f"whether that run is still alive; if it has ended, remove the lock: rm {self._path}"
            )
        if owner.is_alive:
            raise LockedError(self._in_use(owner))

    def _in_use(self, owner: Owner | None) -> str:
        if owner is None:
            return (
                f"{self._what}: {self._folder} is in use by another run, whose process {self._path} does not name; "
                "wait until that run ends, or give this one another folder."
            )
        return (
            f"{self._what}: {self._folder} is in use by {owner}; wait until that run ends, or give this one another "
            "folder."
        )

    def _wait_for_name(self, descriptor: int) -> Owner | None:
        """Waits until the process that holds the lock has written its name into the file, and returns it."""
        deadline = time.monotonic() + _NAMED_AFTER_S
        while True:
            owner = _read_owner(descriptor)
            if owner is not None and not (owner.is_of_this_host and not owner.is_alive):
                return owner
            if time.monotonic() > deadline:
                return owner  # the owner has died, and a child process still holds the file open
            time.sleep(0.01)

    def _without_flock(self, owner: Owner | None) -> str:
        """Returns the error message for a file system without flock, where the user has to remove a stale lock file."""
        if owner is not None and owner.is_of_this_host and owner.is_alive:
            return self._in_use(owner)
        taken_by = "another run" if owner is None else str(owner)
        return (
            f"{self._what}: {self._folder} is locked by {taken_by}, and its file system has no flock, which would show "
            f"whether that run is still alive; if it has ended, remove the lock: rm {self._path}"
        )

    def _sign(self, descriptor: int) -> None:
        text = json.dumps(asdict(Owner.this_process())).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
        os.fsync(descriptor)

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _make_folder(self) -> None:
        missing = [path for path in self._path.parents if not path.exists()]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._made = missing

    def _remove_made(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):  # the folder is not empty
                folder.rmdir()
        self._made = []


def _read_owner(descriptor: int) -> Owner | None:
    """Returns the owner that a lock file names; None if the file is empty or not completely written."""
    text = os.pread(descriptor, 1 << 16, 0)
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_ticks(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot; None if no running process has that id."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name in parentheses, which may itself contain blanks and parentheses.
    fields = status.rpartition(")")[2].split()
    state, start_ticks = fields[0], int(fields[19])
    return None if state in "ZX" else start_ticks
