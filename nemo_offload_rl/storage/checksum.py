"""Computes checksums of files, which detect flipped bits and lost bytes; they do not protect against an adversary."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

# 16 GB/s a core, where SHA-256 has 0.7 GB/s and zlib's CRC-32 1.6 GB/s: benchmarks/checkpoint_integrity.py.
ALGORITHM = "xxh3_128"
# Data is hashed and then written in pieces of this size, so that the write reads the piece from the CPU's cache.
PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class FileSum:
    """Holds the size and checksum of a file when it was written.

    Attributes:
        size: size in bytes.
        checksum: hexadecimal checksum by `ALGORITHM`.
        rank: the rank that wrote the file, and that verifies it before loading; None for the driver.
    """

    size: int
    checksum: str
    rank: int | None


class RawFile(Protocol):
    """Defines an unbuffered file that is open for writing, such as `io.FileIO`."""

    def write(self, data: Any, /) -> int | None:
        """Writes some of the bytes and returns how many."""

    def fileno(self) -> int:
        """Returns the file's descriptor."""
        ...


class HashingFile:
    """Hashes a file while it is written, and stores the first error instead of raising it.

    Several ranks write a checkpoint together and wait for each other, so a rank that raised in between would leave the
    others waiting. They exchange their `error` once all have finished.

    Args:
        file: the file to write to.

    Attributes:
        size: bytes passed to `write` so far.
        error: the first error; nothing is written after it.
    """

    def __init__(self, file: RawFile) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Hashes and writes bytes, or an object with a buffer of them; returns their number."""
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
        """Does nothing, since the file is unbuffered."""

    def sync(self) -> None:
        """Calls fsync; some file systems only notice here that they have no space for the bytes."""
        if self.error is None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self.error = error

    def sum(self, rank: int | None) -> FileSum:
        """Returns the file's size and checksum, if there was no error."""
        return FileSum(self.size, self._hash.hexdigest(), rank)


def file_sum(path: Path, rank: int | None = None) -> FileSum:
    """Reads a file and returns its size and checksum."""
    digest, size = xxhash.xxh3_128(), 0
    piece = memoryview(bytearray(8 * PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            size += count
    return FileSum(size, digest.hexdigest(), rank)
