"""How long do trainers take to move their training state to the host and back, on their own and with the engine?

    python benchmarks/adapters.py --out docs/results/adapters.json [--cases "experts, 10,000 tensors"] [--ways verl]
        [--append]

The benchmark calls each trainer's way as the trainer calls it, and compares it with the engine behind the trainer's
adapter. Every case runs in every way, each in a process of its own, in turn. `gb` counts parameters, masters and
moments; gradients are dropped. `out_s` ends when the driver has the memory, `back_s` when the optimizer step could
begin, `..._waited_s` when the call has returned. Shares of the link refer to `gb`, although some ways leave part of it
on the GPU, which `left_gb` counts. `next_step_bit_equal` compares a step after all cycles with that of the way
`resident`; in the row `resident, again` it tells whether the step is reproducible at all between processes that move
nothing. A way whose package is missing gets a row that says so. With `--append` the rows of other cases and ways stay
in the file, each with the commit, command and date of its own run. `--scale tiny` moves a tiny model, also without a
GPU.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from adapter_ways.cases import CASES
from adapter_ways.measure import Made, measure
from adapter_ways.ways import NEED_CUDA, WAYS
from offload_ways import memory_saver
from result_file import TableValue, print_rows, write_result
from turns import in_turn, my_turn

Row = dict[str, TableValue]
RESIDENT = "resident"
_TIMEOUT_S = 300


def compared(found: Sequence[tuple[Row, Made]]) -> list[Row]:
    """Returns the rows of one case with `next_step_bit_equal`, which is None where either step is not known."""
    wanted = next((made for row, made in found if row["way"] == RESIDENT), [])
    return [
        row if "not_run" in row else row | {"next_step_bit_equal": made == wanted if made and wanted else None}
        for row, made in found
    ]


def child(case: str, way: str, scale: str, cycles: int, out: Path) -> None:
    try:
        with my_turn(WAYS[way].imports):
            faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)  # the wait for the turn does not count
            found = measure(CASES[case].scaled(scale), way, cycles=cycles)
    except (ImportError, torch.OutOfMemoryError) as error:
        found = {"case": case, "way": way, "not_run": str(error).splitlines()[0]}, []
    out.write_text(json.dumps(found))


def in_own_process(case: str, way: str, scale: str, cycles: int) -> tuple[Row, Made]:
    if way in NEED_CUDA and not torch.cuda.is_available():
        return {"case": case, "way": way, "not_run": "there is no CUDA"}, []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--child", case, way, "--scale", scale, "--cycles", str(cycles)]
        try:
            environ = os.environ | memory_saver.preloading(way) | {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
            done = subprocess.run([*command, "--out", str(out)], env=environ, check=False)
            why = f"its process ended with status {done.returncode}"
        except ImportError as error:
            why = str(error)
        if not out.exists():
            return {"case": case, "way": way, "not_run": why}, []
        row, made = json.loads(out.read_text())
    return row, made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="some of the cases")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="some of the ways")
    parser.add_argument("--cycles", type=int, default=3, help="measured cycles after the first, at most")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny for a trial without a GPU")
    parser.add_argument("--append", action="store_true", help="keep the file's rows that are not measured now")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("build/adapters.json"), help="the result file")
    arguments = parser.parse_args()
    if arguments.child:
        case, way = arguments.child
        child(case, way, arguments.scale, arguments.cycles, arguments.out)
        return
    rows: list[Row] = []
    by = ("case", "way") if arguments.append else ()
    for case in arguments.cases:
        run = partial(in_own_process, case, scale=arguments.scale, cycles=arguments.cycles)
        for found in in_turn(run, arguments.ways):
            of_case = compared(found)
            write_result(arguments.out, rows + of_case, append_by=by)
        rows += of_case
        print_rows([row for row in rows if row["case"] == case])
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
