"""Does activation offloading leave every number unchanged, and what does it cost and save?

    export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
    python benchmarks/activation_offload.py --list
    python benchmarks/activation_offload.py --tables parity --missing --seconds 540 --out RESULT.json
    python benchmarks/activation_offload.py --tables cost --only 'dense/attention' --micro-batches 4
    python benchmarks/activation_offload.py --tables parity --share 1/8 --out build/parity1.json
    python benchmarks/activation_offload.py --join docs/results/activation_offload.json build/parity*.json

The benchmark writes each row to the file as soon as it is measured, in place of an older row of the same part, so that
several short runs make one result. The module of each table in activation_cases/ explains its rows. A part that fails
gets a row with its error, and the next part goes on; the exit status reports failures. Shares of parity may run side by
side (each process takes about 9 GiB of GPU memory), and --join merges their files. --join and --picture measure
nothing and need no GPU: they only process existing results.
"""

import argparse
import fnmatch
import importlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

# Transformer Engine reads it when imported.
os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")

import torch
from activation_cases.memory_picture import CurveError, draw
from activation_cases.table import DETERMINISTIC, FAILED, ResultError, ResultFile, Setting, join, share
from offload_ways.report import WAY_FAILURES
from result_file import print_rows

TABLES: Mapping[str, str] = {
    "parity": "parity",
    "cost": "cost",
    "soak": "soak",
    "longest_sequence": "longest",
    "memory": "memory_curve",
}
"""Name of a table, and the module that makes it."""
_SHOWN = ("table", "part", "way", "micro_batch", "step_ms", "overhead_percent", "r", "bit_equal", "steps", "error")


def main() -> None:
    arguments, parser = _arguments()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if arguments.join or arguments.picture:
        try:
            _write(arguments.join, arguments.picture)
        except (CurveError, ResultError) as error:
            parser.error(str(error))
        return
    tables = arguments.tables.split(",")
    if unknown := set(tables) - set(TABLES):
        parser.error(f"--tables: there is no {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    setting = Setting(
        ResultFile(arguments.out),
        steps=arguments.steps,
        micro_batches=tuple(int(size) for size in arguments.micro_batches.split(",") if size),
        late_ms=arguments.delay_copies,
        deadline=time.monotonic() + arguments.seconds,
    )
    if arguments.delay_copies and tables != ["parity"]:
        parser.error("--delay-copies goes with --tables parity alone, since it is no measure of time")
    matching = [
        (table, part, run)
        for table in tables
        for part, run in importlib.import_module(f"activation_cases.{TABLES[table]}").parts(setting).items()
        if any(fnmatch.fnmatch(part, pattern) for pattern in arguments.only.split(","))
        and not (arguments.missing and setting.file.has(table, part, late=bool(setting.late_ms)))
    ]
    chosen = share(matching, *arguments.share)
    if arguments.list:
        print("\n".join(f"{table} {part}" for table, part, _ in chosen))
        return
    if not torch.cuda.is_available():
        parser.error("this needs a GPU; --list does not")
    if os.environ.get(DETERMINISTIC) != "0":
        parser.error(f"set {DETERMINISTIC}=0, or two runs of the same kind would differ")
    failed = [f"{table} {part}" for table, part, run in chosen if not _run(setting, table, part, run)]
    print_rows([{name: row.get(name) for name in _SHOWN} for row in setting.file.rows if row["table"] in tables])
    if failed:
        sys.exit(f"{len(failed)} parts failed: {'; '.join(failed)}")


def _write(joined: list[Path], picture: Path | None) -> None:
    """Writes what is derived from existing results: a joined file or a picture."""
    if joined:
        num_taken, num_left_out = join(joined[0], joined[1:])
        print(f"{joined[0]}: {num_taken} rows taken, {num_left_out} of parts that failed left out")
    if picture:
        draw(picture, picture.with_suffix(".png"))
        print(picture.with_suffix(".png"))


def _run(setting: Setting, table: str, part: str, run: Callable[[], None]) -> bool:
    """Runs a part unless the time is up; returns False if it failed."""
    if setting.time_is_up():
        print(f"{table} {part}: not begun, the time is up", flush=True)
        return True
    start = time.perf_counter()
    try:
        run()
    except WAY_FAILURES as error:
        logging.getLogger(__name__).warning("%s %s: failed", table, part, exc_info=True)
        way = "late copies" if setting.late_ms else FAILED
        setting.file.add(table, part, way, {"error": f"{type(error).__name__}: {error}"[:2000]})
        torch.cuda.synchronize()  # raises, and so ends this process, if the GPU is unusable
        return False
    finally:
        print(f"{table} {part}: {time.perf_counter() - start:.1f} s", flush=True)
    return True


def _arguments() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", default=",".join(TABLES), help="tables to measure, separated by commas")
    parser.add_argument("--only", default="*", help="patterns of part names (with * and ?), separated by commas")
    parser.add_argument("--missing", action="store_true", help="skip parts that the file already has, failed or not")
    parser.add_argument(
        "--share", type=_share, default=(1, 1), metavar="K/N", help="measure only the K-th of N shares of the parts"
    )
    parser.add_argument("--list", action="store_true", help="print which parts would run, and exit")
    parser.add_argument("--steps", type=int, help="number of steps, instead of each table's own")
    parser.add_argument("--micro-batches", default="", help="cost: only these sizes, with commas between")
    parser.add_argument(
        "--delay-copies",
        type=float,
        nargs="?",
        const=1.0,
        default=0.0,
        metavar="MS",
        help="parity: every copy starts this many milliseconds late (1 where no number is given)",
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no part after this many seconds")
    parser.add_argument("--out", type=Path, default=Path("build/activation_offload.json"), help="the result file")
    parser.add_argument(
        "--join",
        type=Path,
        nargs="+",
        default=[],
        metavar="JSON",
        help="only put the rows of result files into the first of them",
    )
    parser.add_argument("--picture", type=Path, metavar="JSON", help="only draw a file of points that memory has made")
    return parser.parse_args(), parser


def _share(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no K/N with K from 1 to N, such as 3/8")
    return int(numbers[1]), int(numbers[2])


if __name__ == "__main__":
    main()
