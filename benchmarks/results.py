"""Writes and prints the result of a benchmark: one row a measured case, plain numbers with the unit in the field's name."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def machine() -> str:
    """What this ran on, in one line."""
    cores = len(os.sched_getaffinity(0))
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return f"{len(names)} x {names[0]}, {cores} cores, torch {torch.__version__}"
    return f"{cores} cores ({platform.machine()}), no GPU, torch {torch.__version__}"


def commit() -> str:
    """The commit that was measured; NEMO_OFFLOAD_RL_COMMIT names it where the tree was copied without its history."""
    named = os.environ.get("NEMO_OFFLOAD_RL_COMMIT")
    if named:
        return named
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def write_results(path: str, rows: list[dict[str, Any]], **extra: Any) -> None:
    """Write {"machine", "commit", "command", "date", "rows"} as JSON, and print the rows as a table."""
    document = {
        "machine": machine(),
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    } | extra
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=2) + "\n")
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(names))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(f"wrote {path}")
