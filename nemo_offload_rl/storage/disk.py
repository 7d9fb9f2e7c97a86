"""Reads files that a user names, replaces files and folders by complete ones, and explains errors of full disks."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# Files of a Hugging Face folder that would be wrong beside another model: the weights with their index, and its ends.
HF_FILES = ("model*.safetensors*", "generation_config.json")

_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
# No space, no quota left, or a file above the limit of `ulimit -f`: the user can fix these while the run goes on.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder(name: str) -> Path:
    """Returns the folder of a kind of result that is kept for later runs, below XDG_CACHE_HOME or ~/.cache.

    Raises:
        RuntimeError: the first is no absolute path, and the user has no home.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative path would be another folder for each process
    return (given if given.is_absolute() else Path.home() / ".cache") / "nemo_offload_rl" / name


def require_writable(folder: Path) -> None:
    """Checks that the user may write in a folder, or make it, without making it.

    Raises:
        ValueError: names the folder, or the nearest one above it that is there.
    """
    folder = folder.absolute()
    there = next(one for one in (folder, *folder.parents) if os.path.exists(one))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ValueError(
            f"the folder {folder} cannot be used: {there} is no folder in which you may write; give another one."
        )


class DiskFullError(ValueError):
    """Says that files could not be written for a lack of space, in one sentence for the user.

    Attributes:
        path: the file or folder that was to be written.
        needed_bytes: bytes that the file or folder takes; None where that is not known.
        free_bytes: bytes that are free on the disk; None where that is not known.
    """

    def __init__(self, path: str, reason: str, needed_bytes: int | None, free_bytes: int | None) -> None:
        super().__init__(path, reason, needed_bytes, free_bytes)  # so that it can be pickled
        self.path = path
        self.reason = reason
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        sizes = [
            f"{_show(size)} {what}"
            for size, what in ((self.needed_bytes, "needed"), (self.free_bytes, "free"))
            if size is not None
        ]
        return f"{self.path} cannot be written: {self.reason}" + (f" ({', '.join(sizes)})" if sizes else "")


def is_disk_full(error: OSError) -> bool:
    """Returns whether an error says that a disk, a quota or a file is at its limit."""
    return error.errno in _FULL


def disk_full(path: Path, error: OSError, needed_bytes: int | None = None) -> DiskFullError:
    """Makes a `DiskFullError` from an error for which `is_disk_full` is true; reads the free space now."""
    assert error.errno is not None
    return DiskFullError(str(path), os.strerror(error.errno), needed_bytes, free_bytes(path))


@contextmanager
def translate_disk_full(path: Path) -> Iterator[None]:
    """Turns errors of a full disk inside the `with` block into `DiskFullError`.

    Raises:
        DiskFullError: there was no space for the path.
    """
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path, error) from error
        raise


def system_error(error: Exception, path: Path) -> OSError | None:
    """Returns the OS error behind an error of a Rust library, which has the errno only in its text; None if absent."""
    number = _RUST_OS_ERROR.search(str(error))
    return None if number is None else OSError(int(number.group(1)), os.strerror(int(number.group(1))), str(path))


def free_bytes(path: Path) -> int | None:
    """Returns the bytes that may still be written to a path's disk; None where the file system does not say.

    Args:
        path: a path that need not exist; its nearest existing parent is used.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def require_free(path: Path, needed_bytes: int, free: int | None) -> None:
    """Checks before a write that the disk has enough space.

    Raises:
        DiskFullError: fewer bytes are free than are needed.
    """
    if free is not None and free < needed_bytes:
        raise DiskFullError(str(path), os.strerror(errno.ENOSPC), needed_bytes, free)


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically, even if the process is killed; its mode follows the user's umask."""
    with writing_whole(path) as file:
        file.write(text.encode())


@contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that replaces the one at `path` once the `with` block has written it, as in `write_whole`."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Calls fsync on a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(folder: Path, stale: Sequence[str]) -> Iterator[Path]:
    """Yields a new folder beside a folder, and replaces that with it once the `with` block has filled it.

    If the block raises, the new folder is removed, and the other one stays as it was.

    Args:
        folder: the folder; may be missing.
        stale: glob patterns of the files that the folder loses if the new one lacks them; others are kept.
    """
    folder = folder.resolve()
    new = unfinished(folder)
    if new.exists():
        shutil.rmtree(new)
    try:
        new.mkdir(parents=True)
        yield new
        replace_folder(folder, new, stale)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def unfinished(folder: Path) -> Path:
    """Returns the folder beside a folder in which its successor is made; what it holds is of no use to anyone."""
    return folder.with_name(f"{folder.name}.partial")


def replace_folder(folder: Path, new: Path, stale: Sequence[str] = ("*",)) -> None:
    """Flushes a complete folder to the disk, and renames it to another, whose contents are removed only then.

    If the process is killed between its two renames, the old contents are in `NAME.replaced` beside it.

    Args:
        folder: the final name; may be missing.
        new: the complete folder, on the same disk.
        stale: see `replacing`.
    """
    for path in [new, *new.rglob("*")]:
        sync(path)
    old = folder.with_name(f"{folder.name}.replaced")
    if folder.exists():
        if old.exists():
            shutil.rmtree(old)
        folder.rename(old)
    new.rename(folder)
    sync(folder.parent)
    if old.exists():
        for path in old.iterdir():
            if not any(map(path.match, stale)) and not (folder / path.name).exists():
                path.rename(folder / path.name)
        shutil.rmtree(old)


def as_by_umask(path: Path) -> None:
    """Gives a file the mode of the user's umask, for files that a library has created readable by the user alone."""
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    """Returns the process's umask without calling os.umask(), which would change it for other threads meanwhile."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise AssertionError("Linux has said its umask here since 4.7")


def _show(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnreadableFileError(ValueError):
    """Says that a path cannot be read as a file; the message continues after the path: "is a folder, not a file".

    Attributes:
        reason: the text that continues after "cannot be read:".
        is_absent: whether the path does not exist.
    """

    def __init__(self, reason: str, *, is_absent: bool = False) -> None:
        is_of_file = reason.startswith("it ")
        super().__init__(reason.removeprefix("it ") if is_of_file else f"cannot be read: {reason}")
        self.reason = reason
        self.is_absent = is_absent


def open_regular_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading; never blocks on another kind of file.

    Raises:
        UnreadableFileError: the path does not exist, is not a regular file, or may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnreadableFileError("it does not exist", is_absent=True) from error
    except OSError as error:
        raise _unreadable(error) from error
    except ValueError as error:  # a null character in the path
        raise UnreadableFileError(str(error)) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UnreadableFileError(f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file")
    return os.fdopen(descriptor, "rb")


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Returns the contents of a regular file.

    Args:
        path: the file.
        max_bytes: the largest size that is read.

    Raises:
        UnreadableFileError: as in `open_regular_file`; or reading fails, or the file is larger than `max_bytes`.
    """
    with open_regular_file(path) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise _unreadable(error) from error
    if len(content) > max_bytes:
        raise UnreadableFileError(f"it has more than {max_bytes:,} bytes, the limit for this file")
    return content


def _unreadable(error: OSError) -> UnreadableFileError:
    return UnreadableFileError((error.strerror or str(error)).lower())
