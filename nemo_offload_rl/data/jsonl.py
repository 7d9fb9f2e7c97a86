"""Reads JSONL files line by line; errors name the line."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.limits import MAX_LINE_CHARS
from nemo_offload_rl.storage.regular_file import UnreadableFileError, open_regular_file


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
                    yield number, json.loads(line, object_pairs_hook=without_repeats)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}:{number} is not JSON: {error}") from error
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
        raise DataError(f"The dataset {path} cannot be read: {error}, in line {number} or shortly after it") from error
    except OSError as error:
        raise DataError(f"The dataset {path} cannot be read: {error}") from error
    if len(line) > MAX_LINE_CHARS:
        raise DataError(
            f"{path}:{number} has more than {MAX_LINE_CHARS:,} characters, the most that a line may have: write one "
            "object a line."
        )
    return line
