"""What does optimizer state off the GPU during training cost: streamed through a window, or stepped on the CPU?

    python benchmarks/cpu_optimizer.py --out docs/results/cpu_optimizer.json [--cases 8B] [--ways streamed]

Every case is tried in every way, each in a process of its own, in turn. `share_of_link` are the bytes of a step both
ways over the time from the first copy's start to the last one's end, as a share of what the link did with copies in
both directions at once, measured in the same process. `bit_equal` compares every step's loss, gradient norm and
parameters with those of the first way that steps the same fraction on the CPU: its kernel rounds otherwise. A way that
does not fit on the GPU has a row that says so. At `--scale tiny` a tiny model is trained, also without a GPU.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from model_shapes import TINY_SIZES
from optimizer_ways.ways import CASES, WAYS, Case
from result_file import TableValue, print_rows, write_result
from turns import in_turn, my_turn


def scaled(case: Case, scale: str) -> Case:
    """The case itself, or the same with a tiny model and batch."""
    if scale == "full":
        return case
    tiny = {**case.hf_config, **TINY_SIZES}
    return dataclasses.replace(case, hf_config=tiny, rows=4, mbs=2, seq_length=16, steps=2)


def compared(rows: Sequence[tuple[dict[str, TableValue], list[Any]]]) -> list[dict[str, TableValue]]:
    """The rows of one case with `bit_equal`: whether what was made equals what the first way of its fraction made."""
    first: dict[TableValue, list[Any]] = {}
    for row, made in rows:
        if made:
            first.setdefault(row["fraction"], made)
    return [row | {"bit_equal": made == first[row["fraction"]] if made else None} for row, made in rows]


def child(case: str, way: str, scale: str, out: Path) -> None:
    import torch
    from optimizer_ways.measure import measure

    try:
        with my_turn():
            found = measure(scaled(CASES[case], scale), WAYS[way])
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        found = {"case": case, "way": way, "fraction": WAYS[way].fraction, "refused": reason}, []
    out.write_text(json.dumps(found))


def in_own_process(case: Case, way: str, scale: str) -> tuple[dict[str, TableValue], list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--child", case.name, way, "--scale", scale, "--out", str(out)]
        done = subprocess.run(command, env={**os.environ, **case.environ}, check=False)
        if not out.exists():
            return {"case": case.name, "way": way, "refused": f"its process ended with status {done.returncode}"}, []
        row, made = json.loads(out.read_text())
    return row, made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="some of the cases")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="some of the ways")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny for a try without a GPU")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("build/cpu_optimizer.json"), help="the result file")
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child, arguments.scale, arguments.out)
        return
    rows: list[dict[str, TableValue]] = []
    for case in (CASES[name] for name in arguments.cases):
        found: list[tuple[dict[str, TableValue], list[Any]]] = []
        run = partial(in_own_process, case, scale=arguments.scale)
        for measured in in_turn(run, [way for way in case.ways if way in arguments.ways]):
            found.append(measured)
            write_result(arguments.out, rows + compared(found))
        rows += compared(found)
        print_rows(rows)


if __name__ == "__main__":
    main()
