"""Reads samples from JSONL files and from folders of Hugging Face datasets, of one split or of a part of it."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, overload

import numpy as np

from nemo_offload_rl.data.fields import RowForm, field_of, has_instead, read_rows, sample_of, text_of
from nemo_offload_rl.data.problem import DataError, Problem

_SHARD = re.compile(r"-(?P<number>\d+)(-of-(?P<total>\d+))?(-[0-9a-f]{8,})?")  # older files end in a checksum
_MOST_SHOWN = 8
_SPLITS = frozenset({"train", "validation", "valid", "val", "dev", "eval", "test"})


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


PARQUET = (".parquet",)


@dataclass(frozen=True)
class ProblemForm:
    """Reads rows with a prompt and an answer; see ``fields.RowForm``.

    Attributes:
        input_key: name of the prompt's field.
        output_key: name of the answer's field.
    """

    input_key: str
    output_key: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields of the prompt and the answer."""
        return self.input_key, self.output_key

    @property
    def nested_keys(self) -> tuple[str, ...]:
        """Empty, since both fields are texts."""
        return ()

    def sample(self, row: Mapping[str, Any], where: str) -> Problem:
        """Makes a problem from a row."""
        prompt, answer = (text_of(field_of(row, key, where), f"{where}: the field {key!r}") for key in self.keys)
        return Problem(prompt, answer, where)


def load_jsonl[Sample](path: Path, form: RowForm[Sample]) -> list[Sample]:
    """Reads one sample per line from a file of JSON objects; skips empty lines.

    Args:
        path: the file.
        form: makes samples from its lines.

    Raises:
        DataError: the file cannot be read or is empty, or a line cannot be used; names the line.
    """
    rows = read_rows(path, (*form.keys, *form.nested_keys))
    samples = [sample_of(form, row, f"{path}:{number}") for number, row in rows]
    if not samples:
        raise DataError(f"The dataset {path} is empty: it needs one JSON object a line.")
    return samples


def load_hf_folder[Sample](path: Path, split: str | None, form: RowForm[Sample]) -> Sequence[Sample]:
    """Opens a folder that ``Dataset.save_to_disk`` wrote, or one with parquet files; reads rows when they are used.

    Args:
        path: the folder.
        split: split of a saved ``DatasetDict``, or of the parquet files (see ``split_files``); None for a folder
            without splits.
        form: makes samples from its rows.

    Raises:
        DataError: the dataset, split or column does not exist, the folder has the split more than once, or the dataset
            has no rows.
    """
    if not path.is_dir():
        raise DataError(f"The dataset folder {path} does not exist or is not a folder.")
    require_files_and_folders(path)
    if is_saved(path):
        return with_columns(_saved_dataset(path, split), path, form)
    files = data_files(path, PARQUET) if split is None else split_files(path, split, PARQUET)
    names = sorted({_SHARD.sub("", file.stem) for file in files}) if split is None else []
    if len(names) > 1 and not _SPLITS.isdisjoint(names):  # a test set is not to be trained on
        raise DataError(
            f"The folder {path} has the parquet files of {', '.join(names[:_MOST_SHOWN])}: name one with split."
        )
    if not files:
        raise no_files(path, split, PARQUET)
    return load_parquet(files, path, form)


def load_parquet[Sample](files: Sequence[Path], path: Path, form: RowForm[Sample]) -> Sequence[Sample]:
    """Opens parquet files as one dataset; reads rows when they are used.

    Args:
        files: the files, in the order of their rows.
        path: the dataset's name in messages.
        form: makes samples from its rows.

    Raises:
        DataError: the files cannot be read, lack a column, or have no rows.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        rows = Dataset.from_parquet([str(file) for file in files])
    except (DatasetGenerationError, *DAMAGED) as error:
        raise DataError(f"The parquet files of {path} cannot be read: {error.__cause__ or error}") from error
    return with_columns(rows, path, form)


def is_saved(path: Path) -> bool:
    """Returns whether ``save_to_disk`` of ``datasets`` wrote this folder."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def with_columns[Sample](rows: Any, path: Path, form: RowForm[Sample]) -> HFRows[Sample]:
    """Presents a ``datasets.Dataset`` as samples.

    Raises:
        DataError: it lacks a column of the form, or has no rows.
    """
    for key in form.keys:
        if key not in rows.column_names:
            raise DataError(f"The dataset {path} has no column {key!r}{has_instead(rows.column_names)}.")
    if len(rows) == 0:
        raise DataError(f"The dataset {path} has no rows.")
    return HFRows(rows, path, form)


# Errors that datasets and pyarrow raise for files that are damaged or of another format.
DAMAGED = (ArithmeticError, AttributeError, LookupError, NotImplementedError, OSError, TypeError, ValueError)

_ROWS_AT_ONCE = 1000


class HFRows[Sample](Sequence[Sample]):
    """Presents the rows of a Hugging Face dataset as samples.

    Args:
        rows: the ``datasets.Dataset``.
        path: the dataset's folder or name, for messages.
        form: makes samples from its rows.
        numbers: the rows' numbers in the original dataset, for messages, int64 [number of rows]; None for all rows.
    """

    def __init__(self, rows: Any, path: Path | str, form: RowForm[Sample], numbers: np.ndarray | None = None) -> None:
        self._numbers = np.arange(len(rows)) if numbers is None else numbers
        self._rows = rows
        self._path = path
        self._form = form

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return self._samples(range(len(self))[index])
        number = range(len(self))[index]
        return self._samples(range(number, number + 1))[0]

    def select(self, rows: np.ndarray) -> HFRows[Sample]:
        """Returns the samples at the given indices (int64 [K]), in that order; reads and copies nothing."""
        return HFRows(self._rows.select(rows), self._path, self._form, self._numbers[rows])

    def __iter__(self) -> Iterator[Sample]:
        """Yields all samples; reads many rows at a time, in a tenth of the time of single reads."""
        for start in range(0, len(self), _ROWS_AT_ONCE):
            yield from self[start : start + _ROWS_AT_ONCE]

    def _samples(self, numbers: range) -> list[Sample]:
        try:
            columns = self._rows[numbers]
        except DAMAGED as error:
            if len(numbers) > 1:  # read the rows one by one to find the damaged one
                return [self[number] for number in numbers]
            number = self._numbers[numbers[0]]
            raise DataError(f"{self._path} row {number} cannot be read: {type(error).__name__}: {error}") from error
        rows = zip(*columns.values(), strict=True)
        return [
            sample_of(self._form, dict(zip(columns, values, strict=True)), f"{self._path} row {number}")
            for number, values in zip(self._numbers[numbers.start : numbers.stop : numbers.step], rows, strict=True)
        ]


def selected[Sample](samples: Sequence[Sample], rows: np.ndarray) -> Sequence[Sample]:
    """Returns the samples at the given indices (int64 [K]), in that order."""
    if isinstance(samples, HFRows):
        return samples.select(rows)
    return [samples[int(row)] for row in rows]


def _saved_dataset(path: Path, split: str | None) -> Any:
    from datasets import Dataset, DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
    except DAMAGED as error:
        raise DataError(
            f"The dataset {path} is not what datasets' save_to_disk writes, or is damaged: {type(error).__name__}: "
            f"{str(error)[:200]}; save it anew."
        ) from error
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise DataError(
                f"The dataset {path} has the splits {', '.join(saved)}; found split: {split!r} in the recipe."
            )
        return saved[split]
    assert isinstance(saved, Dataset)
    if split is not None and saved.split is not None and str(saved.split) != split:
        raise DataError(f"The dataset {path} is the split {str(saved.split)!r}; the recipe asks for {split!r}.")
    return saved


def split_validation[Sample](
    samples: Sequence[Sample], size: float, seed: int
) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Draws validation data from the training data, as ``train_test_split`` of ``datasets``, and so NeMo-RL, does.

    The same samples, size and seed always give the same two parts; no sample is in both.

    Args:
        samples: the N samples.
        size: size of the validation data: a share (below 1, rounded up to whole samples) or a number of
            samples; 0 draws none.
        seed: seed of the draw.

    Returns:
        Training data and validation data, each in the order in which they were drawn.

    Raises:
        DataError: nothing is left to train on.
    """
    if size == 0:
        return samples, []
    num_validation = int(size) if size >= 1 else ceil(size * len(samples))
    if num_validation >= len(samples):
        raise DataError(
            f"data.train.split_validation_size is {size}, which takes {num_validation} samples for validation, but "
            f"data.train has only {len(samples)}: lower it, or give more data."
        )
    order = np.random.default_rng(seed).permutation(len(samples))
    return selected(samples, order[num_validation:]), selected(samples, order[:num_validation])
