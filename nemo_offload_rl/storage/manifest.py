"""Writes and checks the manifest of a checkpoint: the sizes and checksums of its files.

The manifest is written last and checked before loading.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from nemo_offload_rl.storage.disk import write_whole

# 16 GB/s a core, where SHA-256 has 0.7 GB/s and zlib's CRC-32 1.6 GB/s (docs/results/checkpoint_integrity.md).
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


MANIFEST_FILE = "manifest.json"


class UnreadableError(ValueError):
    """Says that a file of a checkpoint is missing or has unexpected content; the message names it."""


class DamagedError(UnreadableError):
    """Says that a file is not as it was written; the message names it and says what is wrong."""


class CheckpointError(ValueError):
    """Says that a checkpoint cannot be used; the message names it, what is wrong with it, and what to do."""


class DamagedCheckpointError(CheckpointError):
    """Says that files of a checkpoint are not as they were written; no other reason is called damage."""


@dataclass(frozen=True)
class Manifest:
    """Lists the sizes and checksums that a checkpoint's files had when they were written.

    Attributes:
        files: sizes and checksums by file name, relative to the checkpoint's folder.
    """

    files: Mapping[str, FileSum]

    def of_rank(self, rank: int, world_size: int) -> Mapping[str, FileSum]:
        """Returns the files that a rank verifies; together the ranks verify all files that ranks wrote.

        There may be fewer ranks than when the checkpoint was written.
        """
        return {
            name: found
            for name, found in self.files.items()
            if found.rank is not None and found.rank % world_size == rank
        }

    def of_driver(self) -> Mapping[str, FileSum]:
        """Returns the files that the driver wrote, and that it verifies."""
        return {name: found for name, found in self.files.items() if found.rank is None}

    def wrong_sizes(self, folder: Path) -> list[str]:
        """Returns a line for each file that is missing or has another size; does not read the files."""
        return [f"{name} {wrong}" for name, found in self.files.items() if (wrong := _wrong_size(folder / name, found))]


def write_manifest(folder: Path, known: Mapping[str, FileSum]) -> Manifest:
    """Writes the manifest of all files below a folder.

    Args:
        folder: the folder, whose files are complete.
        known: files that were hashed while they were written, by name; the other files are read and hashed.

    Raises:
        DamagedError: a known file is missing, or does not have the size that was written.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == MANIFEST_FILE:
            continue
        if name in known and (wrong := _wrong_size(path, known[name])):
            raise DamagedError(f"{path} {wrong}, right after it was written: check the disk")
        files[name] = known[name] if name in known else file_sum(path)
    if missing := sorted(set(known) - set(files)):
        raise DamagedError(f"{folder / missing[0]} is missing right after it was written: check the disk")
    manifest = Manifest(files)
    listed = [{"name": name, **asdict(found)} for name, found in files.items()]
    content = {"algorithm": ALGORITHM, "checksum": _checksum_of(listed), "files": listed}
    write_whole(folder / MANIFEST_FILE, json.dumps(content, indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a folder.

    Raises:
        DamagedError: the manifest is missing or damaged.
        UnreadableError: another version wrote it, with other checksums.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        raise DamagedError(f"{MANIFEST_FILE} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        listed, algorithm = content["files"], content["algorithm"]
        is_whole = content["checksum"] == _checksum_of(listed)
        files = {entry["name"]: FileSum(entry["size"], entry["checksum"], entry["rank"]) for entry in listed}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{MANIFEST_FILE} is not what was written ({type(error).__name__}: {error})") from error
    if not is_whole:
        raise DamagedError(f"{MANIFEST_FILE} is not what was written (its own checksum differs)")
    if algorithm != ALGORITHM:
        raise UnreadableError(f"{MANIFEST_FILE} has {algorithm} checksums, but this version reads only {ALGORITHM}")
    return Manifest(files)


def find_damage(folder: Path, files: Mapping[str, FileSum]) -> list[str]:
    """Reads all files and returns a line for each damaged one, in the manifest's order."""
    lines = []
    for name, wanted in files.items():
        path = folder / name
        wrong = _wrong_size(path, wanted)
        if wrong is None:
            try:
                checksum = file_sum(path).checksum
            except OSError as error:
                wrong = f"cannot be read ({error.strerror})"
            else:
                if checksum != wanted.checksum:
                    wrong = f"has changed since it was written ({ALGORITHM} {checksum}, expected {wanted.checksum})"
        if wrong:
            lines.append(f"{name} {wrong}")
    return lines


def require_whole(checkpoint: Path) -> None:
    """Verifies all files of a checkpoint.

    Raises:
        DamagedCheckpointError: a file, or the manifest, is missing or damaged.
        CheckpointError: another version wrote its manifest.
    """
    try:
        manifest = read_manifest(checkpoint)
    except DamagedError as error:
        raise DamagedCheckpointError(f"Checkpoint {checkpoint} is damaged: {error}.") from error
    except UnreadableError as error:
        raise CheckpointError(f"Checkpoint {checkpoint} cannot be used: {error}.") from error
    if lines := find_damage(checkpoint, manifest.files):
        raise DamagedCheckpointError(f"Checkpoint {checkpoint} is damaged: {show_damage(lines)}.")


def show_damage(lines: Iterable[str]) -> str:
    """Returns the first line about damaged files, and the number of further ones."""
    first, *others = lines
    return first if not others else f"{first} (and {len(others)} more of its files are damaged)"


def _wrong_size(path: Path, wanted: FileSum) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    return None if size == wanted.size else f"has {size} bytes, expected {wanted.size}"


def _checksum_of(listed: list[dict[str, Any]]) -> str:
    return xxhash.xxh3_128(json.dumps(listed, sort_keys=True).encode()).hexdigest()
