"""How long does the switch between training and vLLM take on one GPU, in this package and in NeMo-RL's way?

All settings run the same GRPO recipe, each in its own processes, one after the other:

- `ours`: the run as it is; vLLM stays awake where the plan has room for both;
- `ours_asleep`: the same with an engine that sleeps while the policy computes;
- `upstream_way`: replays NeMo-RL's calls in our code (`colocated_ways/upstream_*.py` and `engines.py` name the file of
  each): vLLM sleeps at level 1, parameters, gradients and moments all move, one after the other, and the refit
  allocates its buckets anew.

After the GRPO steps all settings switch back and forth without log-probs, training a step each time, and then generate
greedily. The losses of all steps and the tokens are compared: `upstream_way` is a fair baseline only if it computes the
same. On a GPU they are bit-equal only with `--deterministic`, which selects kernels and micro-batches for that. For the
switch whose total is the median, a timeline shows what driver, policy and engine did when.

    python benchmarks/colocated.py --out docs/results/colocated.json [key=value ...]
    python benchmarks/colocated.py --scale tiny --cycles 200 --settings ours --out build/cycles.json

`--cycles` checks something else: that memory, threads, file descriptors and mappings do not grow over cycles of varying
lengths. It names those that grow and then exits with 1. The engine sleeps in these cycles whatever the setting, so
`ours` and `ours_asleep` are the same there. `--scale tiny` also runs without a GPU.

A setting that is refused or runs out of memory gets a row with the reason. The others still run; the exit status is
then 1 as well.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # before Ray is imported; else it builds a second venv

from colocated_ways.comparisons import comparisons
from colocated_ways.marks import FOLDER_VARIABLE
from colocated_ways.measured import Measured
from colocated_ways.refusals import REFUSALS, RefusedError, read_measured, reason, write_measured, write_refusal
from colocated_ways.run import RECIPES, START_VARIABLE, run_setting
from colocated_ways.settings import SETTINGS
from colocated_ways.timeline import ORIGINS, table
from result_file import TableValue, print_rows, write_result


def main() -> int:
    """Measures every setting and writes the result after each."""
    arguments = parse_arguments()
    if arguments.child is not None:
        setting, result = arguments.child
        return measure_here(setting, Path(result), arguments)
    found: dict[str, Measured] = {}
    refused: dict[str, str] = {}
    for setting in arguments.settings:
        try:
            found[setting] = in_own_process(setting, deterministic=arguments.deterministic)
        except RefusedError as error:
            refused[setting] = str(error)
        rows = rows_of(found, refused, arguments)
        write_result(arguments.out, [*rows, *timeline_rows(found, arguments)])
    for setting, measured in found.items():
        for direction, spans in measured.spans().items():
            print(f"{setting}, {direction}, in ms from {ORIGINS[direction]} on:", *table(spans), sep="\n")
    print_rows(rows)
    grown = [f"{row['setting']}: {row['metric']}" for row in rows if row["value"] is False and _is_flatness(row)]
    for name in grown:
        print(f"grows over {arguments.cycles} cycles: {name.removesuffix(', flat')}")
    return 1 if grown or refused else 0


def _is_flatness(row: Mapping[str, TableValue]) -> bool:
    return str(row["metric"]).endswith(", flat")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=list(RECIPES), default="full", help="tiny for a trial without a GPU")
    parser.add_argument("--config", type=Path, help="another GRPO recipe than the scale's")
    parser.add_argument("--model", help="its name in the rows; the recipe's policy.model_name where it is left out")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--backend", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--enforce-eager", action="store_true", help="vLLM without CUDA graphs, in every setting")
    parser.add_argument("--deterministic", action="store_true", help="kernels of which losses are equal, run by run")
    parser.add_argument("--steps", type=int, default=5, help="GRPO steps; the first is not counted; at least 2")
    parser.add_argument("--switches", type=int, default=5, help="switches back and forth that count, after a first one")
    parser.add_argument("--cycles", type=int, default=0, help="measure this many cycles of varying lengths instead")
    parser.add_argument("--out", type=Path, default=Path("build/colocated.json"), help="the result file")
    parser.add_argument("--child", nargs=2, metavar=("SETTING", "RESULT"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe")
    arguments = parser.parse_intermixed_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: the first step is not counted, so take at least 2")
    return arguments


def measure_here(setting: str, result: Path, arguments: argparse.Namespace) -> int:
    """Measures one setting in this process and returns the process's exit status.

    Args:
        setting: one of `SETTINGS`.
        result: the file that gets what was measured, or why nothing was.
        arguments: of the command line.
    """
    try:
        measured = run_setting(setting, arguments)
    except REFUSALS as error:
        traceback.print_exc()
        why = reason(error)
        print(f"{setting} is refused: {why}", file=sys.stderr)
        write_refusal(result, why)
        return 1
    write_measured(result, measured)
    return 0


def in_own_process(setting: str, *, deterministic: bool) -> Measured:
    """Runs this command again for one setting alone and returns what it measured.

    Raises:
        RefusedError: it could not be measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        environment = os.environ | {FOLDER_VARIABLE: folder, START_VARIABLE: str(time.monotonic())}
        if deterministic:
            environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # of attention's kernels
        command = [sys.executable, __file__, *sys.argv[1:], "--child", setting, str(result)]
        done = subprocess.run(command, env=environment, check=False)
        return read_measured(result, done.returncode)


def rows_of(
    found: Mapping[str, Measured], refused: Mapping[str, str], arguments: argparse.Namespace
) -> list[dict[str, TableValue]]:
    """Returns the rows of the result: `setting`, `gpus`, `model`, `metric`, `value`, `unit`.

    Args:
        found: what each setting gave.
        refused: why the others gave nothing.
        arguments: of the command line.
    """
    rows: list[dict[str, TableValue]] = []

    def add(setting: str, metric: str, value: TableValue, unit: str) -> None:
        rows.append(_row(found, arguments, setting, metric, value, unit))

    for setting, measured in found.items():
        for metric, value, unit in measured.figures:
            add(setting, metric, value if isinstance(value, bool) else round(value, 5), unit)
        for number, (loss, norm) in enumerate(zip(measured.losses, measured.grad_norms, strict=True), start=1):
            add(setting, f"loss of step {number}", loss, "")
            add(setting, f"gradient norm of step {number}", norm, "")
    for setting, why in refused.items():
        add(setting, "refused", why, "")
    if not arguments.cycles:
        for comparison in comparisons(found):
            add(*comparison)
    return rows


def timeline_rows(found: Mapping[str, Measured], arguments: argparse.Namespace) -> list[dict[str, TableValue]]:
    """Returns rows for each span of one switch of each setting: its start and, unless it is a moment, its duration."""
    rows = []
    for setting, measured in found.items():
        for direction, spans in measured.spans().items():
            for span in spans:
                metric = f"{direction}: {span.process}: {span.name}"
                rows.append(_row(found, arguments, setting, f"{metric}, starts", round(span.start_ms, 2), "ms"))
                if span.takes_ms is not None:
                    rows.append(_row(found, arguments, setting, f"{metric}, takes", round(span.takes_ms, 2), "ms"))
    return rows


def _row(
    found: Mapping[str, Measured],
    arguments: argparse.Namespace,
    setting: str,
    metric: str,
    value: TableValue,
    unit: str,
) -> dict[str, TableValue]:
    model = arguments.model or ("1.5B" if arguments.scale == "full" else arguments.scale)
    gpus = next((measured.num_gpus for measured in found.values()), None)  # None: no run came as far as to count them
    return {"setting": setting, "gpus": gpus, "model": model, "metric": metric, "value": value, "unit": unit}


if __name__ == "__main__":
    sys.exit(main())
