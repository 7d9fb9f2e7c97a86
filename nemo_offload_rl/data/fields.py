"""Reads fields of a dataset's rows, and says of a value that cannot be used where it is and what was found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from nemo_offload_rl.data.errors import DataError


class RowForm[Sample](Protocol):
    """Makes samples of a dataset's rows."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields, or columns, that a row needs."""

    @property
    def nested_keys(self) -> tuple[str, ...]:
        """The fields that are read of objects within a row."""

    def sample(self, row: Mapping[str, Any], where: str) -> Sample:
        """Makes a sample of a row.

        Args:
            row: its values by field.
            where: the row's place, for messages.

        Raises:
            DataError: the row has another form; names its place.
        """


def sample_of[Sample](form: RowForm[Sample], row: Any, where: str) -> Sample:
    """Makes a sample of what stands in a row's place.

    Raises:
        DataError: it is no object, or has another form; names its place.
    """
    if not isinstance(row, dict):
        *names, last = map(repr, form.keys)
        raise DataError(f"{where} is not an object with the fields {', '.join(names)} and {last}.")
    return form.sample(row, where)


def field_of(row: Mapping[str, Any], key: str, where: str) -> Any:
    """Returns the value of a field.

    Raises:
        DataError: there is no such field; names those that there are.
    """
    if key not in row:
        names = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where} has no field {key!r}; it has {names if len(names) <= 200 else names[:197] + '...'}.")
    return row[key]


def text_of(value: Any, name: str, expected: str = "a text or a number") -> str:
    """Returns a text as it is, and a number as text.

    Args:
        value: of a field.
        name: place and name of the field, for messages.
        expected: what the field may be.

    Raises:
        DataError: it is something else, or no valid text.
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
    """Says in a few words what a value is, for messages."""
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
