"""What does it cost to keep optimizer state off the GPU during training: streamed, or stepped on the CPU?

python benchmarks/cpu_optimizer.py --out docs/results/cpu_optimizer.json [--cases 8B] [--ways streamed] [--append]

Every case runs in every way, each in a process of its own, in turn. `share_of_link` is a step's bytes in both
directions over the time from the first copy's start to the last one's end, as a share of the link's speed with copies
in both directions at once, measured in the same process. `times_streamed` is the optimizer's time divided by that of
the streamed way. `bit_equal` compares each step's loss, gradient norm and parameters with those of the first way that
steps the same fraction on the CPU, because the CPU kernel rounds differently. `host_mib` is page-locked memory,
`peak_host_mib` the peak of the whole process. A way that does not fit on the GPU gets
a row that says so. `--scale tiny` trains a tiny model, also without a GPU.
"""

import argparse
import dataclasses
import gc
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
from optimizer_ways.ways import CASES, STREAMED, WAYS, Case, Way
from result_file import TableValue, print_rows, write_result
from turns import in_turn, my_turn

Row = dict[str, TableValue]


def scaled(case: Case, scale: str, steps: int | None = None) -> Case:
    """Returns the case, or the same with a tiny model and batch; with other measured steps if given."""
    if scale == "tiny":
        tiny = {**case.hf_config, **TINY_SIZES}
        case = dataclasses.replace(case, hf_config=tiny, rows=4, mbs=2, seq_length=16, steps=2)
        case = dataclasses.replace(case, larger_mbs=tuple(mbs for mbs in case.larger_mbs if mbs > case.mbs))
    return case if steps is None else dataclasses.replace(case, steps=steps)


def compared(rows: Sequence[tuple[Row, list[Any]]]) -> list[Row]:
    """Compares the rows of one case.

    Returns:
        The rows with `bit_equal`, whether what was made equals what the first way of the fraction made, and with
        `times_streamed`, the optimizer's seconds over those of the streamed way.
    """
    first: dict[TableValue, list[Any]] = {}
    streamed_ms = next((row["optimizer_ms"] for row, made in rows if made and row["way"] == STREAMED), None)
    found = []
    for row, made in rows:
        equal = times = None
        if made:
            equal = made == first[row["fraction"]] if row["fraction"] in first else None
            first.setdefault(row["fraction"], made)
            times = _ratio(row["optimizer_ms"], streamed_ms)
        found.append(row | {"bit_equal": equal, "times_streamed": times})
    return found


def _ratio(one: TableValue, other: TableValue) -> float | None:
    if not isinstance(one, float) or not isinstance(other, float) or not other:
        return None
    return round(one / other, 3)


def child(case: Case, way: Way, out: Path) -> None:
    """Measures in this process when it is its turn."""
    with my_turn():
        import torch
        from optimizer_ways.measure import measure

        def save(measured: tuple[Row, list[Any]]) -> None:
            out.write_text(json.dumps(measured))

        try:
            measure(case, way, save)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            save(({"case": case.name, "way": way.name, "fraction": way.fraction, "refused": reason}, []))
        # Free the GPU memory that the error's traceback holds before the next process has its turn.
        gc.collect()
        torch.cuda.empty_cache()


def in_own_process(pair: tuple[Case, str], arguments: Sequence[str]) -> tuple[Row, list[Any]]:
    """Returns what a process measured.

    Args:
        pair: the case, and the name of the way.
        arguments: of the command line, that the process gets, too.
    """
    case, way = pair
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--child", case.name, way, *arguments, "--out", str(out)]
        done = subprocess.run(command, env={**os.environ, **case.environ}, check=False)
        if not out.exists():
            return {"case": case.name, "way": way, "refused": f"its process ended with status {done.returncode}"}, []
        row, made = json.loads(out.read_text())
    return row, made


def parsed_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="some of the cases")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="some of the ways")
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps, instead of those of each case")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny for a trial without a GPU")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("build/cpu_optimizer.json"), help="the result file")
    parser.add_argument(
        "--append", action="store_true", help="keep the file's rows of cases and ways that are not measured now"
    )
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps is a number of steps, 1 or more; found {arguments.steps}")
    return arguments


def main() -> None:
    """Measures every case in every way and writes the result after each."""
    arguments = parsed_arguments()
    if arguments.child:
        case, way = arguments.child
        child(scaled(CASES[case], arguments.scale, arguments.steps), WAYS[way], arguments.out)
        return
    passed_on = ["--scale", arguments.scale, *([] if arguments.steps is None else ["--steps", str(arguments.steps)])]
    cases = [CASES[name] for name in arguments.cases]
    pairs = [(case, way) for case in cases for way in case.ways if way in arguments.ways]
    rows: list[Row] = []
    for found in in_turn(partial(in_own_process, arguments=passed_on), pairs):
        by_case = [[one for one in found if one[0]["case"] == case.name] for case in cases]
        rows = [row for of_case in by_case for row in compared(of_case)]
        write_result(arguments.out, rows, append_by=("case", "way") if arguments.append else ())
    print_rows([{name: value for name, value in row.items() if name != "refused"} for row in rows])


if __name__ == "__main__":
    main()
