"""Problems from JSONL files and from Hugging Face datasets folders."""

from __future__ import annotations

import math
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.jsonl import read_rows
from nemo_offload_rl.data.problem import Problem, ProblemSet


def load_jsonl(path: Path, input_key: str, output_key: str) -> list[Problem]:
    """Reads one JSON object a line; empty lines are skipped.

    Args:
        path: of the file.
        input_key: field with the prompt.
        output_key: field with the answer.

    Raises:
        DataError: the file cannot be read or is empty, or a line is not an object with both fields; names the line.
    """
    problems = [
        _problem_of(row, input_key, output_key, where=f"{path}:{number}")
        for number, row in read_rows(path, (input_key, output_key))
    ]
    if not problems:
        raise DataError(f"The dataset {path} is empty: it needs one JSON object a line.")
    return problems


def load_hf_folder(path: Path, split: str | None, input_key: str, output_key: str) -> ProblemSet:
    """Opens a folder that ``Dataset.save_to_disk`` wrote, or one with parquet files; rows are read as they are used.

    Args:
        path: of the folder.
        split: of a saved ``DatasetDict``, or what the names of the parquet files start with; None for a folder without.
        input_key: column with the prompt.
        output_key: column with the answer.

    Raises:
        DataError: there is no such dataset, split or column, or it has no rows.
    """
    rows = _open_folder(path, split)
    for key in (input_key, output_key):
        if key not in rows.column_names:
            raise DataError(f"The dataset {path} has no column {key!r}; it has {', '.join(rows.column_names)}.")
    if len(rows) == 0:
        raise DataError(f"The dataset {path} has no rows.")
    return HFProblems(rows, path, input_key, output_key)


# What datasets and pyarrow raise of files that are damaged or of another form: they look up what is not there.
_DAMAGED = (ArithmeticError, AttributeError, LookupError, NotImplementedError, OSError, TypeError, ValueError)


class HFProblems(Sequence[Problem]):
    """Rows of a Hugging Face dataset as problems."""

    def __init__(self, rows: Any, path: Path, input_key: str, output_key: str) -> None:
        self._rows = rows
        self._path = path
        self._input_key = input_key
        self._output_key = output_key

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Problem: ...

    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...

    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        try:
            row = self._rows[index]
        except _DAMAGED as error:
            raise DataError(f"{self._path} row {index} cannot be read: {type(error).__name__}: {error}") from error
        return _problem_of(row, self._input_key, self._output_key, where=f"{self._path} row {index}")


def _open_folder(path: Path, split: str | None) -> Any:
    if not path.is_dir():
        raise DataError(f"The dataset folder {path} does not exist or is not a folder.")
    for file in path.rglob("*"):
        if not (stat.S_ISREG(file.stat().st_mode) or stat.S_ISDIR(file.stat().st_mode)):
            raise DataError(f"{file}, in the folder of a dataset, is neither a file nor a folder; delete it.")
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved_dataset(path, split)
    files = sorted(path.rglob(f"{split}*.parquet" if split is not None else "*.parquet"))
    if not files:
        of_split = "" if split is None else f" of the split {split!r}"
        raise DataError(
            f"The folder {path} holds no dataset{of_split}: it needs what datasets' save_to_disk writes, or parquet "
            f"files{'' if split is None else f' whose names start with {split!r}'}."
        )
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return Dataset.from_parquet([str(file) for file in files])
    except (DatasetGenerationError, *_DAMAGED) as error:
        raise DataError(f"The parquet files of {path} cannot be read: {error.__cause__ or error}") from error


def _saved_dataset(path: Path, split: str | None) -> Any:
    from datasets import Dataset, DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
    except _DAMAGED as error:
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


def _problem_of(row: Any, input_key: str, output_key: str, where: str) -> Problem:
    if not isinstance(row, dict):
        raise DataError(f"{where} is not an object with the fields {input_key!r} and {output_key!r}.")
    return Problem(prompt=_text(row, input_key, where), answer=_text(row, output_key, where), where=where)


def _text(row: dict[str, Any], key: str, where: str) -> str:
    if key not in row:
        names = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where} has no field {key!r}; it has {names if len(names) <= 200 else names[:197] + '...'}.")
    value = row[key]
    if isinstance(value, str):
        if _has_surrogate(value):
            raise DataError(
                f"{where}: the field {key!r} has half of a character (a lone surrogate, \\ud800 to \\udfff)."
            )
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    found = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else repr(value)
    raise DataError(f"{where}: the field {key!r} must be a text or a number, found {found}.")


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
