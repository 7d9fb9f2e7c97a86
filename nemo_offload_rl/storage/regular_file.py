"""Reads files that a user names, and refuses paths such as a FIFO or a device, on which `open` could block forever."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

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
