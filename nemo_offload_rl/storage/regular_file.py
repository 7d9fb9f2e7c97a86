"""Reads files that a user names, of which some are no files: a FIFO or a device would keep `open` waiting for ever."""

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
    """Says that a path cannot be read as a file; the message goes on after its name: "is a folder, no file".

    Attributes:
        reason: what goes on after "cannot be read:".
        is_absent: whether nothing is there.
    """

    def __init__(self, reason: str, *, is_absent: bool = False) -> None:
        is_of_file = reason.startswith("it ")
        super().__init__(reason.removeprefix("it ") if is_of_file else f"cannot be read: {reason}")
        self.reason = reason
        self.is_absent = is_absent


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for anything else.

    Raises:
        UnreadableFileError: it is absent, no regular file, or may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnreadableFileError("it does not exist", is_absent=True) from error
    except OSError as error:
        raise UnreadableFileError(f"{(error.strerror or str(error)).lower()}") from error
    except ValueError as error:  # a null character in the path
        raise UnreadableFileError(str(error)) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UnreadableFileError(f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, no file")
    return os.fdopen(descriptor, "rb")


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the whole of a regular file.

    Args:
        path: of the file.
        max_bytes: the most that is read.

    Raises:
        UnreadableFileError: as `open_regular_file`; or the file is larger.
    """
    with open_regular_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UnreadableFileError(f"it has more than {max_bytes:,} bytes, the most that is read of it")
    return content
