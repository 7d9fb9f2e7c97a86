"""Finds the files of one split in a folder that may hold other splits, such as a mirror of a hub dataset."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_offload_rl.data.errors import DataError

_SHARD = re.compile(r"-(?P<number>\d+)(-of-(?P<total>\d+))?(-[0-9a-f]{8,})?")  # older files end in a checksum
_MOST_SHOWN = 8


def split_files(folder: Path, split: str, endings: Sequence[str], *, in_folders: Sequence[str] = ()) -> list[Path]:
    """Returns the files of a split in the order of their rows; empty without any.

    They are `SPLIT.parquet` or its shards, `SPLIT-00000-of-00002.parquet` and so on, in the folder itself or one below
    it; or all files of a folder named `SPLIT`. A file of the split `train_1M` does not match the split `train`.

    Args:
        folder: the folder to search, with all folders below it.
        split: name of the split.
        endings: file name endings, such as `.parquet`.
        in_folders: the folders, relative to `folder`, in which the files may be; empty for any.

    Raises:
        DataError: the folder has several sources of the split, shards are missing, or the files are in a folder that is
            not in `in_folders`.
    """
    sources: dict[_Source, list[Path]] = {}
    for file in data_files(folder, endings):
        if (source := _source_of(file, folder, split)) is not None:
            sources.setdefault(source, []).append(file)
    if not sources:
        return []
    first, *others = sources
    if others:
        raise DataError(_ambiguous(folder, sources[first][0], sources[others[0]][0], f"the split {split!r}"))
    files = sources[first]
    if first.num_shards not in (None, len(files)):
        raise DataError(
            f"The folder {folder} has {len(files)} of the {first.num_shards} files that {files[0].relative_to(folder)} "
            f"is one of; copy the others of the split {split!r} there, too."
        )
    home = str(first.home.relative_to(folder))
    if in_folders and home not in in_folders:
        raise DataError(
            f"{files[0]} is of another part of the dataset than {' and '.join(in_folders)}, where the split {split!r} "
            f"is looked for in {folder}; move it there if it is of that part."
        )
    return files


def only_files(folder: Path, endings: Sequence[str]) -> list[Path]:
    """Returns all data files of a folder whose dataset has only one split, whatever their names.

    Raises:
        DataError: the files are in several folders, or have different endings.
    """
    files = data_files(folder, endings)
    for file in files[1:]:
        if (file.parent, file.suffix) != (files[0].parent, files[0].suffix):
            raise DataError(_ambiguous(folder, files[0], file, "the dataset"))
    return files


def data_files(folder: Path, endings: Sequence[str]) -> list[Path]:
    """Returns the sorted files, in a folder and the folders below it, that have one of the endings."""
    return sorted(file for file in folder.rglob("*") if file.suffix in endings and file.is_file())


def require_files_and_folders(folder: Path) -> None:
    """Checks that a folder only has files and folders, since reading a pipe, for example, could block forever.

    Raises:
        DataError: something there is neither, or is a link to nothing, without which a part of the data could be left
            out unnoticed; the message names it.
    """
    for file in folder.rglob("*"):
        try:
            mode = file.stat().st_mode
        except OSError as error:
            raise DataError(
                f"{file}, in the folder of a dataset, cannot be read ({error.strerror}): a link there must lead to a "
                "file or a folder; put that in its place, or delete it."
            ) from error
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise DataError(f"{file}, in the folder of a dataset, is neither a file nor a folder; delete it.")


def no_files(folder: Path, split: str | None, endings: Sequence[str]) -> DataError:
    """Makes the error for a folder without a dataset, or without the split; it names the files that are there."""
    kinds = " or ".join(endings)
    found = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
    shown = ", ".join([*found[:_MOST_SHOWN], *(["..."] if len(found) > _MOST_SHOWN else [])]) or "no file"
    if split is None:
        of_split, needs = "", f"files ending in {kinds}"
    else:
        of_split = f" of the split {split!r}"
        needs = f"{split}{endings[0]} or shards named as {split}-00000-of-00002{endings[0]} (the ending may be {kinds})"
    return DataError(
        f"The folder {folder} holds no dataset{of_split}: it needs what datasets' save_to_disk writes, or {needs}; "
        f"it has {shown}."
    )


@dataclass(frozen=True)
class _Source:
    """Identifies files that together are one split.

    Attributes:
        home: the folder of the files, or of the folder named after the split.
        form: their ending, and how they are named.
        num_shards: their number; None if their names do not say.
    """

    home: Path
    form: tuple[str, str]
    num_shards: int | None = None


def _source_of(file: Path, folder: Path, split: str) -> _Source | None:
    in_own_folder = file.parent.name == split and file.parent != folder
    home = file.parent.parent if in_own_folder else file.parent
    if file.stem == split:
        return _Source(home, (file.suffix, "one file"))
    shard = _SHARD.fullmatch(file.stem.removeprefix(split)) if file.stem.startswith(split) else None
    if shard is not None:
        total = shard["total"]
        return _Source(home, (file.suffix, "shards"), None if total is None else int(total))
    return _Source(home, (file.suffix, "folder")) if in_own_folder else None


def _ambiguous(folder: Path, first: Path, second: Path, what: str) -> str:
    names = " and ".join(str(file.relative_to(folder)) for file in (first, second))
    return f"The folder {folder} has two sources of {what}: {names}; keep one of them there, and move the other away."
