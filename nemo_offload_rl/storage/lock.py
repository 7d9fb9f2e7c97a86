"""Locks a folder for one run at a time, with a lock file that its process holds and that names the process.

The lock is a flock, which the operating system releases when the process ends, however it ends. Many file systems have
no flock, or one that does not reach other machines. So the file also has its owner's name, and its modification time
changes every few seconds while the owner lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_BEAT_S = 5.0
# An owner that has not changed the file for so long, by the clock of the process that waits, has ended.
_SILENT_S = 60.0
_POLL_S = 0.1
# Time within which a process has signed the file after it has made it, or has seen its owner silent; above _POLL_S.
_SIGNED_S = 0.5
# Time within which a process that holds the flock has signed, on a busy machine too; it is waited for only to name it.
_NAMED_S = 5.0


class LockedError(ValueError):
    """Says that another run holds the folder, or that it cannot be locked, in one sentence for the user."""


@dataclass(frozen=True)
class Owner:
    """Names the process that holds a lock.

    Attributes:
        host: name of its machine or container.
        pid: its process id.
        kernel: boot id and PID namespace; equal for processes of one machine and container, whose flocks exclude each
            other.
        since: when the process took the lock, in local time.
    """

    host: str
    pid: int
    kernel: str
    since: str

    @classmethod
    def this_process(cls) -> Self:
        """Returns the calling process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        since = datetime.now().astimezone().isoformat(" ", "milliseconds")
        return cls(socket.gethostname(), os.getpid(), f"{boot} {os.readlink('/proc/self/ns/pid')}", since)

    def __str__(self) -> str:
        return f"process {self.pid} of host {self.host} (since {self.since})"


class FolderLock:
    """Locks a folder against other runs, inside its `with` block or until `release`.

    Args:
        folder: the folder; made where it is missing, and then removed on release if it is empty.
        what: the folder's name for the user, such as checkpointing.checkpoint_dir.
        say: prints a line for the user about a lock that is waited for or taken over.
        is_beside: whether the lock file is next to the folder instead of in it, so that the folder may be removed and
            made again under the lock.
        beat_s: seconds between changes of the file's modification time.
        silent_s: seconds without a change after which an owner that no flock shows has ended.
    """

    def __init__(
        self,
        folder: Path,
        what: str,
        say: Callable[[str], None] = logger.info,
        *,
        is_beside: bool = False,
        beat_s: float = _BEAT_S,
        silent_s: float = _SILENT_S,
    ) -> None:
        self._folder = folder
        self._path = folder.with_name(f".{folder.name}{LOCK_FILE}") if is_beside else folder / LOCK_FILE
        self._what = what
        self._say = say
        self._beat_s = beat_s
        self._silent_s = silent_s
        self._descriptor: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Takes the lock; waits only to find out whether an owner that no flock shows is alive.

        Raises:
            LockedError: another process holds it, or the folder cannot be written.
        """
        try:
            missing = [path for path in self._path.parents if not path.exists()]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._made = missing
            while not self._try():
                pass
        except OSError as error:
            self._remove_made()
            reason = f"the folder {self._folder} cannot be used: {error.strerror}; give another one."
            raise LockedError(f"{self._what}: {reason}") from error
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="folder lock", daemon=True)
        self._beats.start()

    def release(self) -> None:
        """Releases the lock; does nothing if it is not held."""
        if self._descriptor is None:
            return
        self._ended.set()
        self._beats.join()
        # The file is removed while the lock is still held: a process that opens the path from now on makes a new one.
        if self._is_mine(self._descriptor):
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
        self._remove_made()

    def _try(self) -> bool:
        """Takes the lock; returns False if its previous owner has removed the file meanwhile."""
        try:
            descriptor, is_new = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            try:
                descriptor, is_new = os.open(self._path, os.O_RDWR), False
            except FileNotFoundError:
                return False
        try:
            has_flock = self._flock(descriptor)
            self._owner = Owner.this_process()
            before = None if is_new else self._signed_by()
            is_certain = is_new or (has_flock and before is not None and before.kernel == self._owner.kernel)
            is_silent = is_certain or before is None or self._is_silent(before)
            if not self._is_at_path(descriptor):
                return False
            if not is_silent:
                raise self._in_use(self._signed_by())
            if before is not None:
                self._say(f"Taking over the lock {self._path}: its owner, {before}, has ended.")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(self._owner)).encode(), 0)
            os.fsync(descriptor)
            if not is_certain:
                time.sleep(_SIGNED_S)  # another process may have seen the same silence and signed, too
                if not self._is_mine(descriptor):
                    raise self._in_use(self._signed_by())
            self._descriptor, descriptor = descriptor, -1
            return True
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _flock(self, descriptor: int) -> bool:
        """Locks the open file; returns False if its file system has no flock."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use(self._signed_by(is_alive=True)) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            return False
        return True

    def _signed_by(self, *, is_alive: bool = False) -> Owner | None:
        """Waits for the file's signature, if `is_alive` that of a process which exists; returns None without one."""
        deadline = time.monotonic() + (_NAMED_S if is_alive else _SIGNED_S)
        kernel = Owner.this_process().kernel
        while True:
            owner = self._look()[-1]
            has_ended = owner is not None and owner.kernel == kernel and not Path(f"/proc/{owner.pid}").exists()
            if (owner is not None and not (is_alive and has_ended)) or time.monotonic() > deadline:
                return owner
            time.sleep(_POLL_S / 10)

    def _is_silent(self, owner: Owner) -> bool:
        """Watches the file for signs that the owner lives; returns whether there were none."""
        self._say(
            f"{self._what}: {self._folder} is locked by {owner}, which may have ended: waiting for up to "
            f"{self._silent_s:g} s for a sign of life."
        )
        first, deadline = self._look(), time.monotonic() + self._silent_s
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if self._look() != first:
                return False
        return True

    def _beat(self) -> None:
        """Shows until the release that the owner lives."""
        assert self._descriptor is not None
        while not self._ended.wait(self._beat_s):
            with contextlib.suppress(OSError):  # a server that does not answer now may do so at the next beat
                if not self._is_mine(self._descriptor):
                    logger.error("The lock %s was removed, or taken over by another run.", self._path)
                    return
                os.utime(self._descriptor)

    def _look(self) -> tuple[int, int, Owner | None]:
        """Returns the file's inode, modification time and owner; zeros and None if it is absent.

        The file is opened each time, so that a network file system asks its server.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return 0, 0, None
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            try:
                return status.st_ino, status.st_mtime_ns, Owner(**json.loads(file.read()))
            except (ValueError, TypeError):  # not completely written
                return status.st_ino, status.st_mtime_ns, None

    def _is_at_path(self, descriptor: int) -> bool:
        return self._look()[0] == os.fstat(descriptor).st_ino

    def _is_mine(self, descriptor: int) -> bool:
        return self._is_at_path(descriptor) and self._look()[-1] == self._owner

    def _in_use(self, owner: Owner | None) -> LockedError:
        by = f"another run, whose process {self._path} does not name" if owner is None else owner
        return LockedError(
            f"{self._what}: {self._folder} is in use by {by}; wait until that run ends, or give this one another "
            "folder."
        )

    def _remove_made(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):  # the folder is not empty
                folder.rmdir()
        self._made = []
