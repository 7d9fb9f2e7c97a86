"""Stores results in a file that grows row by row, over as many runs as needed."""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result_file import TableValue, commit, machine, write_result

Row = dict[str, TableValue]

# Fields of every row, null where they do not apply.
FIELDS = (
    "table",
    "part",
    "way",
    "model",
    "modules",
    "fraction",
    "graphs",
    "delay",
    "micro_batch",
    "parallel",
    "step_ms",
    "tokens_per_s",
    "peak_mib",
    "allocated_peak_mib",
    "reserved_peak_mib",
    "driver_peak_mib",
    "moved_mib",
    "distinct_mib",
    "r",
    "overhead_percent",
    "bit_equal",
    "steps",
)
DETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
"""A variable of Transformer Engine's: with 0 it takes kernels whose results are the same in each run."""
FAILED = "failed"
"""The way of a row that has nothing but an error."""
KEY = ("table", "part", "way", "micro_batch")
"""A new row takes the place of an old one that agrees in these."""


class ResultFile:
    """Writes rows to disk after each `add`, so that a run that is stopped loses none of them.

    Args:
        path: of the JSON file; rows that it holds stay.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = json.loads(path.read_text())["rows"] if path.is_file() else []

    def add(self, table: str, part: str, way: str, fields: Mapping[str, TableValue]) -> Row:
        """Adds a row, or replaces the one with the same key.

        Args:
            table: parity, cost, soak, longest_sequence or memory.
            part: what was measured; see `--list`.
            way: which run of the part.
            fields: the others of `FIELDS`, and more. Each row says on what machine and at which commit it was measured.

        Returns:
            The whole row.
        """
        where = {"machine": machine(), "commit": commit()}
        given = {"table": table, "part": part, "way": way, **fields}
        row = dict.fromkeys(FIELDS, None) | given | where
        self.rows = merged(self.rows, row)
        beside = self.path.with_name(f".{self.path.name}.new")
        write_result(beside, self.rows)
        os.replace(beside, self.path)
        return row

    def has(self, table: str, part: str, late: bool) -> bool:
        """Returns whether the part has a row, failed or not; `late` asks for one with late copies."""
        rows = [row for row in self.rows if row["table"] == table and row["part"] == part]
        return any((row["way"] == "late copies") == late for row in rows)


def merged(rows: list[Row], row: Row) -> list[Row]:
    """Returns the rows with a new one added, in place of one with the same key if there is one.

    A failed row of the same part is removed.
    """
    part = (row["table"], row["part"])
    if row["way"] != FAILED:
        rows = [old for old in rows if (old["table"], old["part"]) != part or old["way"] != FAILED]
    keys = [tuple(old[name] for name in KEY) for old in rows]
    key = tuple(row[name] for name in KEY)
    if key in keys:
        at = keys.index(key)
        return [*rows[:at], row, *rows[at + 1 :]]
    return [*rows, row]


class ResultError(ValueError):
    """Reports a file that is not a result."""


def join(path: Path, others: Sequence[Path]) -> tuple[int, int]:
    """Merges the rows of other result files into one, each in place of an older one with the same key.

    Args:
        path: of the JSON file that takes them; its command stays.
        others: whose rows are taken, but for those of parts that failed; of equal keys the later file's.

    Returns:
        Numbers of rows that were taken, and of those that were left out.

    Raises:
        ResultError: a file cannot be read, or is no result; nothing is written then.
    """
    result = _read(path)
    rows: list[Row] = result["rows"]
    num_taken = num_left_out = 0
    for other in map(_read, others):
        for row in other["rows"]:
            if row.get("error") is None:
                rows = merged(rows, row)
                num_taken += 1
            else:
                num_left_out += 1
        result["date"] = max(result["date"], other["date"])
    named = {name: _as_rows_say(rows, name) for name in ("machine", "commit")}
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(result | named | {"rows": rows}, indent=2, allow_nan=False) + "\n")
    os.replace(beside, path)
    return num_taken, num_left_out


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} cannot be read as a result file ({error}); give what --out has written") from error
    if not (isinstance(result, dict) and {"rows", "date"} <= set(result)):
        raise ResultError(f"{path} has no rows and date, so it is no result file; give what --out has written")
    return result


def _as_rows_say(rows: Sequence[Row], name: str) -> str:
    """Returns the value that all rows share, or all their values, the most frequent first."""
    values = [str(value) for value, _ in Counter(row[name] for row in rows).most_common()]
    return values[0] if len(values) == 1 else f"{'; '.join(values)}: as each row says"


def share[Part](parts: Sequence[Part], number: int, of: int) -> Sequence[Part]:
    """Returns one share of the parts, numbered from 1; neighbouring parts have plain runs in common."""
    return parts[len(parts) * (number - 1) // of : len(parts) * number // of]


@dataclass(frozen=True)
class Setting:
    """Holds what every table is given.

    Attributes:
        file: takes the rows.
        steps: instead of a table's own number of steps.
        micro_batches: instead of a table's own sizes.
        late_ms: by how much every copy between GPU and host is delayed.
        deadline: nothing new starts after it, in `time.monotonic()`'s seconds.
    """

    file: ResultFile
    steps: int | None = None
    micro_batches: tuple[int, ...] = ()
    late_ms: float = 0.0
    deadline: float = math.inf

    def num_steps(self, usual: int) -> int:
        """Returns how many steps to take."""
        return usual if self.steps is None else self.steps

    def time_is_up(self) -> bool:
        """Returns whether nothing new should start."""
        return time.monotonic() > self.deadline


def as_list(names: tuple[str, ...]) -> str:
    """Joins names in a cell."""
    return ", ".join(names) if names else "none"
