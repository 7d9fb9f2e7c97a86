"""Checksums of files, against flipped bits and lost bytes; not against an adversary."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

# 16 GB/s a core, where SHA-256 has 0.7 GB/s and zlib's CRC-32 1.6 GB/s: benchmarks/checkpoint_integrity.py.
ALGORITHM = "xxh3_128"
# Hashed and then written piece by piece, a piece is read from the processor's cache the second time.
PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class FileSum:
    """Holds the size and checksum of a file when it was written.

    Attributes:
        size: in bytes.
        checksum: hexadecimal, by `ALGORITHM`.
        rank: the worker that wrote it, and that checks it before it is read; None for the driver.
    """

    size: int
    checksum: str
    rank: int | None


class RawFile(Protocol):
    """Defines a file that is opened for writing, without a buffer, such as `io.FileIO`."""

    def write(self, data: Any, /) -> int | None:
        """Write some of the bytes and return how many."""

    def fileno(self) -> int:
        """Return the file's descriptor."""
        ...


class HashingFile:
    """Hashes a file while it is written, and keeps its first error in place of raising it.

    Several ranks write a checkpoint together and wait for each other, so that one which raised in between would leave
    the others waiting: they look at each other's `error` when all are through.

    Args:
        file: where the bytes go.

    Attributes:
        size: bytes that were to be written so far.
        error: the first; nothing is written after it.
    """

    def __init__(self, file: RawFile) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Take bytes, or what has them as a buffer; returns how many."""
        pieces = memoryview(data).cast("B")
        for start in range(0, pieces.nbytes, PIECE_BYTES):
            piece = pieces[start : start + PIECE_BYTES]
            self._hash.update(piece)
            self._write(piece)
        self.size += pieces.nbytes
        return pieces.nbytes

    def _write(self, piece: memoryview) -> None:
        try:
            while self.error is None and piece.nbytes:
                piece = piece[self._file.write(piece) or 0 :]
        except OSError as error:
            self.error = error

    def flush(self) -> None:
        """Do nothing: no byte is held back."""

    def sync(self) -> None:
        """Have the disk hold the bytes; some file systems notice only now that they have no room for them."""
        if self.error is None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self.error = error

    def sum(self, rank: int | None) -> FileSum:
        """Returns the file's size and checksum, if there was no error."""
        return FileSum(self.size, self._hash.hexdigest(), rank)


def file_sum(path: Path, rank: int | None = None) -> FileSum:
    """Read a file and hash it."""
    digest, size = xxhash.xxh3_128(), 0
    piece = memoryview(bytearray(8 * PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            size += count
    return FileSum(size, digest.hexdigest(), rank)
