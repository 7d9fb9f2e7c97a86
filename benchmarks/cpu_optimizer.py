"""What does it cost to keep optimizer state off the GPU during training: streamed, or stepped on the CPU?

python benchmarks/cpu_optimizer.py --out docs/results/cpu_optimizer.json [--cases 8B] [--ways streamed] [--append]

Every case runs in every way, each in a process of its own, in turn. `share_of_link` is a step's bytes in both
directions over the time from the first copy's start to the last one's end, as a share of the link's speed with copies
in both directions at once, measured in the same process. `times_streamed` is the optimizer's time divided by that of
the streamed way. `bit_equal` compares each step's loss, gradient norm and parameters with those of the first way that
steps the same fraction on the CPU, because the CPU kernel rounds differently. `host_mib` is page-locked memory,
`peak_host_mib` the peak of the whole process. A way that does not fit on the GPU gets a row that says so. `--scale
tiny` trains a tiny model, also without a GPU.
"""

import argparse
import dataclasses
import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from model_shapes import QWEN2_1_5B, QWEN3_8B, TINY_SIZES
from result_file import TableValue, print_rows, write_result
from turns import in_turn, my_turn, run_children

Row = dict[str, TableValue]

STREAMED = "streamed"
"""The name of the way that others are compared with."""
_STREAM = "++policy.residency.table.train.optimizer_state=streamed"
_OPTIMIZER = "++policy.megatron_cfg.optimizer"


@dataclass(frozen=True)
class Way:
    """Describes a way to step an optimizer.

    Attributes:
        name: of the row.
        overrides: that make a recipe use it.
        fraction: of the parameters that are stepped on the CPU.
        overlap: whether the CPU's steps and copies overlap; None where nothing is stepped there.
    """

    name: str
    overrides: tuple[str, ...] = ()
    fraction: float = 0.0
    overlap: bool | None = None


def _on_cpu(fraction: float, *, overlap: bool) -> Way:
    overrides = (
        f"{_OPTIMIZER}.optimizer_cpu_offload=true",
        f"{_OPTIMIZER}.optimizer_offload_fraction={fraction}",
        f"{_OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d={str(overlap).lower()}",
    )
    return Way(f"CPU {fraction:g}{', overlap' if overlap else ''}", overrides, fraction, overlap)


ON_GPU = (Way("resident"), Way(STREAMED, (_STREAM, "policy.residency.stream_window_mib=512")))
ON_CPU = tuple(_on_cpu(fraction, overlap=overlap) for fraction in (0.5, 1.0) for overlap in (False, True))
WAYS: Mapping[str, Way] = {way.name: way for way in (*ON_GPU, *ON_CPU)}
_GPU_WAYS = tuple(way.name for way in ON_GPU)


@dataclass(frozen=True)
class Case:
    """Describes a model and the batches to train it on.

    Attributes:
        name: of the row.
        hf_config: the model's sizes; its weights are random.
        rows: of a global batch.
        mbs: rows of a micro-batch.
        seq_length: tokens of a row.
        steps: that are measured, after two that are not.
        ways: that are tried.
        overrides: of the recipe.
        environ: of the process.
        larger_mbs: larger micro-batches, which the streamed way tries one after the other until one does not fit.
    """

    name: str
    hf_config: Mapping[str, Any]
    rows: int = 64
    mbs: int = 4
    seq_length: int = 512
    steps: int = 5
    ways: tuple[str, ...] = _GPU_WAYS
    overrides: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    larger_mbs: tuple[int, ...] = ()


_PRECISION_AWARE = "policy.megatron_cfg.optimizer.use_precision_aware_optimizer"
_ALL_LAYERS_AGAIN = (
    "policy.megatron_cfg.activation_checkpointing=true",
    "policy.megatron_cfg.recompute_granularity=full",
    "++policy.megatron_cfg.recompute_method=uniform",
    "++policy.megatron_cfg.recompute_num_layers=1",
)
# Attention's backward pass in a fixed order, so that ways can be compared bit by bit. It is slower, but attention is 2%
# of the FLOPs of the 1.5 B shape's rows of 512 tokens.
_DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            "1.5B, 10 bytes a parameter",
            QWEN2_1_5B,
            ways=tuple(WAYS),
            overrides=(f"{_PRECISION_AWARE}=true",),
            environ=_DETERMINISTIC,
        ),
        Case(
            "1.5B, 12 bytes a parameter", QWEN2_1_5B, overrides=(f"{_PRECISION_AWARE}=false",), environ=_DETERMINISTIC
        ),
        Case(
            "1.5B, deterministic",
            QWEN2_1_5B,
            rows=8,
            steps=18,  # after two others: 20 are compared
            environ=_DETERMINISTIC,
        ),
        Case(
            "8B",
            QWEN3_8B | {"dtype": "bfloat16"},  # in float32 its weights would be made on the CPU, which takes minutes
            rows=8,
            mbs=1,
            seq_length=2048,
            steps=3,
            overrides=_ALL_LAYERS_AGAIN,
            larger_mbs=(2, 4, 8, 16, 32, 64, 128),
        ),
    )
}


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
        from optimizer_steps import measure

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
    [(found, status)] = run_children(__file__, [["--child", case.name, way, *arguments]], case.environ)
    if found is None:
        return {"case": case.name, "way": way, "refused": f"its process ended with status {status}"}, []
    row, made = found
    return row, made


def parsed_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="some of the cases")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="some of the ways")
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps, instead of those of each case")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny for a trial without a GPU")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", "--output", type=Path, default=Path("build/cpu_optimizer.json"), help="the result file"
    )
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
