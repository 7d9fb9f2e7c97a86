"""Reads fields of a dataset's rows; errors say where a value is and what was found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from nemo_offload_rl.data.errors import DataError


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
        raise DataError(f"{where} is not an object with the fields {', '.join(names)} and {last}.")
    return form.sample(row, where)


def field_of(row: Mapping[str, Any], key: str, where: str) -> Any:
    """Returns the value of a row's field.

    Raises:
        DataError: the row lacks the field; names the fields that it has.
    """
    if key not in row:
        names = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where} has no field {key!r}; it has {names if len(names) <= 200 else names[:197] + '...'}.")
    return row[key]


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
