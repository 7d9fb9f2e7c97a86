"""Reads JSONL files and fields of a dataset's rows; errors say where a value is and what was found."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from nemo_offload_rl.data.problem import MAX_LINE_CHARS, DataError
from nemo_offload_rl.storage.disk import UnreadableFileError, open_regular_file


class RowForm[Sample](Protocol):
    """Defines how samples are made from a dataset's rows."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields, or columns, that a row needs."""

    @property
    def nested_keys(self) -> tuple[str, ...]:
        """The fields that are read from objects within a row."""

    def sample(self, row: Mapping[str, Any], where: str) -> Sample:
        """Makes a sample from a row.

        Args:
            row: the row's values by field.
            where: file and line, or row number, for messages.

        Raises:
            DataError: the row has another format; names its place.
        """


def sample_of[Sample](form: RowForm[Sample], row: Any, where: str) -> Sample:
    """Makes a sample from a row that may be any JSON value.

    Raises:
        DataError: the row is not an object, or has another format; names its place.
    """
    if not isinstance(row, dict):
        *names, last = map(repr, form.keys)
        raise DataError(
            f"{where} is {describe(row)}; each line must be one object with the fields {', '.join(names)} and {last}."
        )
    return form.sample(row, where)


def field_of(row: Mapping[str, Any], key: str, where: str) -> Any:
    """Returns the value of a row's field.

    Raises:
        DataError: the row lacks the field; names the fields that it has.
    """
    if key not in row:
        raise DataError(f"{where} has no field {key!r}{has_instead(row)}.")
    return row[key]


def has_instead(names: Collection[str]) -> str:
    """Returns what a row or a dataset without a field has instead, and how rows of messages are read."""
    shown = ", ".join(map(repr, names)) or "none"
    own = ": for rows of messages, dataset_name is a class of your own that holds them" if "messages" in names else ""
    return f"; it has {shown if len(shown) <= 200 else shown[:197] + '...'}{own}"


def text_of(value: Any, name: str, expected: str = "a text or a number") -> str:
    """Returns a text unchanged, and a number as text.

    Args:
        value: the field's value.
        name: place and name of the field, for messages.
        expected: the kinds of values that the field may have, for messages.

    Raises:
        DataError: the value is neither, or not valid Unicode.
    """
    if isinstance(value, str):
        if _has_surrogate(value):
            raise DataError(f"{name} has half of a character (a lone surrogate, \\ud800 to \\udfff).")
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    raise DataError(f"{name} must be {expected}, found {describe(value)}.")


def describe(value: Any) -> str:
    """Returns a short description of a value, for messages."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:97]}..."


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def read_rows(path: Path, keys: Collection[str]) -> Iterator[tuple[int, Any]]:
    """Yields the number, from 1, and the parsed value of each line that is not empty.

    Args:
        path: the file.
        keys: the fields that the caller reads; none of them may occur twice in an object.

    Raises:
        DataError: the file cannot be read, or a line is not JSON, too long, or has such a field twice.
    """
    try:
        file = open_regular_file(path)
    except UnreadableFileError as error:
        raise DataError(f"The dataset {path} cannot be read: {error.reason}.") from error

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            twice = [key for key in keys if names.count(key) > 1]
            if twice:
                raise _RowError(f"has the field {twice[0]!r} twice; delete one")
        return row

    # Universal newlines, not str.splitlines(): it also splits at characters that may occur in JSON strings.
    with io.TextIOWrapper(file, encoding="utf-8-sig") as lines:
        number = 0
        while line := _next_line(lines, path, number + 1):
            number += 1
            if line.strip():
                try:
                    yield number, json.loads(line.rstrip("\n"), object_pairs_hook=without_repeats)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{path}:{number} is not JSON ({error}); each line must be one JSON object."
                    ) from error
                except _RowError as error:
                    raise DataError(f"{path}:{number} {error}.") from error
                except RecursionError as error:
                    raise DataError(f"{path}:{number} has lists or objects nested too deeply to be read.") from error
                except ValueError as error:  # from int(), which Python limits to 4,300 digits
                    raise DataError(
                        f"{path}:{number} has an integer of more than 4,300 digits, which cannot be read; write it as "
                        "text."
                    ) from error


class _RowError(ValueError):
    """Says what is wrong with a row; the caller puts the row's place before the message."""


def _next_line(lines: io.TextIOWrapper, path: Path, number: int) -> str:
    try:
        line = lines.readline(MAX_LINE_CHARS + 1)
    except UnicodeDecodeError as error:
        kinds = {".parquet": "HFDataset reads parquet, from a folder", ".gz": "unpack it", ".zst": "unpack it"}
        remedy = kinds.get(path.suffix, "write it in UTF-8")
        raise DataError(
            f"The dataset {path} cannot be read: {error}, in line {number} or shortly after it; {remedy}."
        ) from error
    except OSError as error:
        raise DataError(f"The dataset {path} cannot be read: {error}") from error
    if len(line) > MAX_LINE_CHARS:
        raise DataError(
            f"{path}:{number} has more than {MAX_LINE_CHARS:,} characters, the most that a line may have: write one "
            "object a line."
        )
    return line
