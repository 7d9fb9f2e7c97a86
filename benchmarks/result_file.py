"""Writes results in their common form: machine, commit, command and date, and one row for each measured case."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TableValue = float | int | str | bool | None

_ORIGIN = ("machine", "commit", "command", "date")


def write_result(
    path: Path,
    rows: Sequence[Mapping[str, TableValue]],
    *,
    append_by: Sequence[str] = (),
    **counted: str | Mapping[str, Any],
) -> None:
    """Writes rows as `{"machine", "commit", "command", "date", "rows"}`.

    Args:
        path: The JSON file; its folder is made where it is missing.
        rows: One a measured case: plain numbers, with the unit in the field's name.
        append_by: Fields that tell one case from another. Given, rows that the file has of other cases stay in it, with
            the machine, commit, command and date of their own run; empty, the file is written anew.
        **counted: What the rows count or are computed from, such as the commit of another project, written before them.
    """
    result: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        **counted,
    }
    if append_by and path.exists():
        rows = _appended(json.loads(path.read_text()), rows, append_by)
    result["rows"] = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


def _appended(
    before: Mapping[str, Any], rows: Sequence[Mapping[str, TableValue]], fields: Sequence[str]
) -> list[Mapping[str, TableValue]]:
    """Merges the rows of an earlier result with new ones, in place of rows that were measured again."""

    def case_of(row: Mapping[str, TableValue]) -> tuple[TableValue, ...]:
        return tuple(row.get(name) for name in fields)

    now = {case_of(row): row for row in rows}
    origin = {name: before[name] for name in _ORIGIN}
    kept = [now.pop(case_of(row), origin | row) for row in before["rows"]]
    return [*kept, *now.values()]


def print_rows(rows: Sequence[Mapping[str, TableValue]]) -> None:
    """Prints rows as a table with one column for each field."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([str(row[name]) if name in row else "-" for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def machine() -> str:
    """Describes the machine of the figures: its GPUs if there are any, processor, cores and memory."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    processor = f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB"
    return ", ".join([*(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)), processor])


def commit() -> str:
    """Returns the checked-out commit, with `+changes` where tracked files differ from it.

    NEMO_OFFLOAD_RL_COMMIT names the commit on a machine that has a copy of the tree without its history.
    """
    if "NEMO_OFFLOAD_RL_COMMIT" in os.environ:
        return os.environ["NEMO_OFFLOAD_RL_COMMIT"]
    head = _git("rev-parse", "--short", "HEAD")
    return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
