"""Lets one run at a time into a folder, by a lock that its process holds and that has its name.

The operating system holds the lock (flock) and lets go of it when the process ends, however it ends. The owner's name
is in the file, so that a second run can be told who it is, and for file systems whose flock does not reach other hosts.
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

# What file systems without flock answer; there the file is made by one process alone (O_EXCL).
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# So long after taking the lock, at most, a process has written its name into it.
_NAMED_AFTER_S = 0.5


class LockedError(ValueError):
    """Says that another run has the folder, or that it cannot be locked, in one sentence for the user."""


@dataclass(frozen=True)
class Owner:
    """Names the process that holds a lock.

    Attributes:
        host: its machine's name.
        pid: its id there, which may be another process's later.
        boot: the machine's boot id.
        start_ticks: when the process started, in clock ticks since that boot; tells it from a later one of the same id.
        since: when it took the lock, in local time.
    """

    host: str
    pid: int
    boot: str
    start_ticks: int
    since: str

    @classmethod
    def this_process(cls) -> Self:
        """Returns the one that runs this."""
        pid = os.getpid()
        start_ticks = _start_ticks(pid)
        assert start_ticks is not None
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        return cls(socket.gethostname(), pid, _boot_id(), start_ticks, since)

    @property
    def is_of_this_host(self) -> bool:
        """Whether it can be told here if it is alive."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs; only to be asked where `is_of_this_host`."""
        return self.boot == _boot_id() and _start_ticks(self.pid) == self.start_ticks

    def __str__(self) -> str:
        return f"process {self.pid} of host {self.host} (since {self.since})"


class FolderLock:
    """Keeps other runs out of a folder while it is entered, or until `release`.

    Args:
        folder: made where it is missing, and removed again if it is empty at the end.
        what: how the user knows the folder, such as checkpointing.checkpoint_dir.
        is_beside: the lock's file is beside the folder, which may then be removed and made again under the lock.

    Attributes:
        taken_over_from: the process that had the lock and has died; None where none had.
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
        """Returns the notice about a lock that was taken over; None where none was."""
        if self.taken_over_from is None:
            return None
        return f"The lock {self._path} of {self.taken_over_from}, which has ended, is taken over."

    def acquire(self) -> None:
        """Take the lock, at once or not at all.

        Raises:
            LockedError: another process has it, or may have it; or the folder cannot be written.
        """
        try:
            self._make_folder()
            while not self._try():
                pass
        except OSError as error:
            self._remove_made()
            raise LockedError(f"{self._what}: the folder {self._folder} cannot be used: {error.strerror}") from error

    def release(self) -> None:
        """Let the next run in; does nothing where the lock is not held."""
        if self._descriptor is None:
            return
        # Removed while it is still held: who opens the path from now on makes a new file.
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
        self._remove_made()

    def _try(self) -> bool:
        """Take the lock; False where the file was removed meanwhile by its owner, who has ended."""
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
                f"{self._what}: {self._folder} was taken by {owner}, and whether that run still goes on cannot be seen "
                f"from host {socket.gethostname()}; if it has ended, remove the lock: rm {self._path}"
            )
        if owner.is_alive:
            raise LockedError(self._in_use(owner))

    def _in_use(self, owner: Owner | None) -> str:
        if owner is None:
            return f"{self._what}: {self._folder} is in use by another run, which {self._path} does not name."
        return (
            f"{self._what}: {self._folder} is in use by {owner}; wait until that run ends, or give this one another "
            "folder."
        )

    def _wait_for_name(self, descriptor: int) -> Owner | None:
        """Returns the process that holds the lock, which writes its name right after it has taken it."""
        deadline = time.monotonic() + _NAMED_AFTER_S
        while True:
            owner = _read_owner(descriptor)
            if owner is not None and not (owner.is_of_this_host and not owner.is_alive):
                return owner
            if time.monotonic() > deadline:
                return owner  # it has died, and a process that it started still holds the file open
            time.sleep(0.01)

    def _without_flock(self, owner: Owner | None) -> str:
        """Returns the message for a system without locks: there the file alone counts, and is removed by hand."""
        if owner is not None and owner.is_of_this_host and owner.is_alive:
            return self._in_use(owner)
        taken_by = "another run" if owner is None else str(owner)
        return (
            f"{self._what}: {self._folder} was taken by {taken_by}, and its file system has no flock, which would tell "
            f"whether that run still goes on; if it has ended, remove the lock: rm {self._path}"
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
            with contextlib.suppress(OSError):  # it is in use by now
                folder.rmdir()
        self._made = []


def _read_owner(descriptor: int) -> Owner | None:
    """Returns the owner that a lock file names; None where it names none, or has not been written to its end."""
    text = os.pread(descriptor, 1 << 16, 0)
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_ticks(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since the machine's boot; None where there is none of that id."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name in brackets, which may hold blanks and brackets itself.
    fields = status.rpartition(")")[2].split()
    state, start_ticks = fields[0], int(fields[19])
    return None if state in "ZX" else start_ticks
