"""Where does a colocated GRPO step spend its seconds and GPU memory, with and without pinned optimizer offloading?

Runs the same recipe twice on one machine, one run after the other, each in fresh processes: with
policy.use_pinned_optimizer_offload false (host memory of optimizer state is not page-locked, and copies go through a
staging buffer) and true. Seconds are medians of the steps after the first, which compiles and allocates. Memory is the
largest reading of the driver's count in any of those steps, over all processes, on the fullest GPU.

python benchmarks/grpo_phases.py --max-new-tokens 160 [--out docs/results/grpo_phases.json] [key=value ...]

With its 480 new tokens, a step of the 1.5 B recipe takes 40 s on an H200. Shorter answers let both runs finish in
minutes; the model, and with it the bytes moved, stays the same. A machine without a GPU runs
examples/configs/grpo_tiny_cpu.yaml, with --config.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0"
)  # before Ray is imported; else `uv run` builds a second venv

from gpu_watch import GpuWatch, WatchedTimer
from result_file import TableValue, print_rows, write_result
from rich.console import Console

from nemo_offload_rl import config
from nemo_offload_rl.algorithms import grpo
from nemo_offload_rl.metrics.moves import Moves, median_moves, moves_table
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.run.preflight import machine_of, resolve_for
from nemo_offload_rl.run.setup import with_run_length

RECIPE = Path(__file__).parent / "recipes" / "grpo_1_5B_random.yaml"
# The value of policy.use_pinned_optimizer_offload in each way.
WAYS = {"staged": False, "ours": True}
WHOLE_STEP = "whole step"
EXPOSED_SHARE_BAR = 0.20
HOST_MEMORY = {"host_rss_gib": "residency/host_rss_gib", "host_pinned_gib": "residency/host_pinned_gib"}


@dataclass(frozen=True)
class Measured:
    """Holds the measured steps of one way.

    Attributes:
        seconds: of each phase of each counted step.
        peaks_gib: the largest GPU memory of each phase in any counted step; empty without a GPU.
        metrics: of each counted step.
    """

    seconds: Sequence[Mapping[str, float]]
    peaks_gib: Mapping[str, float]
    metrics: Sequence[Mapping[str, float]]

    @property
    def phases(self) -> list[str]:
        """Returns the phases in the order in which they end in a step, the whole step last."""
        return list(dict.fromkeys(phase for step in self.seconds for phase in step))

    def median_s(self, phase: str) -> float:
        """Returns the median seconds over the steps that have the phase."""
        return statistics.median(step[phase] for step in self.seconds if phase in step)

    @property
    def moves(self) -> Moves:
        """Returns the medians of the moves between GPU and host."""
        return median_moves(self.metrics)


def main() -> int:
    """Measures each way, prints the tables, writes the result."""
    arguments = parse_arguments()
    with GpuWatch() as watch:
        ways = {way: measure(way, arguments, watch) for way in WAYS}
    rows = rows_of(ways)
    write_result(arguments.out, rows)
    print_rows(phases_table(ways))
    for way, measured in ways.items():
        if (moves := moves_table(measured.metrics)) is not None:
            moves.title = f"{way}: {moves.title}"
            Console(width=100).print(moves)
    for direction, share in exposed_shares(ways["ours"].metrics).items():
        verdict = "reached" if share <= EXPOSED_SHARE_BAR else "missed"
        print(f"exposed share of the optimizer's {direction}: {share:.1%}; at most {EXPOSED_SHARE_BAR:.0%}: {verdict}")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=RECIPE, help="a GRPO recipe")
    parser.add_argument("--out", type=Path, default=Path("build/grpo_phases.json"), help="the result file")
    parser.add_argument("--steps", type=int, default=3, help="steps of each way, the first not counted; at least 2")
    parser.add_argument("--max-new-tokens", type=int, help="shorter answers than the recipe's")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: the first step is not counted, so take at least 2")
    return arguments


def measure(way: str, arguments: argparse.Namespace, watch: GpuWatch) -> Measured:
    """Runs the recipe's steps in one way, in its own processes."""
    overrides = [f"policy.use_pinned_optimizer_offload={str(WAYS[way]).lower()}", *arguments.overrides]
    if arguments.max_new_tokens is not None:
        overrides.append(f"policy.generation.max_new_tokens={arguments.max_new_tokens}")
    recipe: Any = config.load(arguments.config, overrides).config
    section = recipe["cluster"]
    with Cluster(num_nodes=section["num_nodes"], gpus_per_node=section["gpus_per_node"]) as cluster:
        recipe = resolve_for(machine_of(cluster), recipe, "grpo").config
        preparation = grpo.prepare(recipe)
        algorithm: Any = preparation.build(with_run_length(recipe["policy"], arguments.steps), cluster)
        try:
            return run_steps(algorithm, arguments.steps, watch, way)
        finally:
            algorithm.shutdown()


def run_steps(algorithm: grpo.GRPO, num_steps: int, watch: GpuWatch, way: str) -> Measured:
    """Runs the steps without validation and checkpoints."""
    seconds: list[Mapping[str, float]] = []
    metrics: list[Mapping[str, float]] = []
    peaks_gib: dict[str, float] = {}
    for step in range(1, num_steps + 1):
        is_counted = step > 1
        timer = WatchedTimer(watch, peaks_gib if is_counted else {})
        with timer.phase(WHOLE_STEP):
            of_step = algorithm.step(step, timer)
        print(f"{way}, step {step} of {num_steps}: {timer.seconds()[WHOLE_STEP]:.2f} s")
        if is_counted:
            seconds.append(timer.seconds())
            metrics.append(of_step)
    return Measured(seconds, peaks_gib, metrics)


def rows_of(ways: Mapping[str, Measured]) -> list[dict[str, TableValue]]:
    """Returns the rows of the result: `case`, `way`, `metric`, `value`, and `bar` where a bar is set."""
    rows: list[dict[str, TableValue]] = []

    def add(case: str, way: str, metric: str, value: float, bar: float | None = None) -> None:
        rows.append({"case": case, "way": way, "metric": metric, "value": round(value, 5), "bar": bar})

    for way, measured in ways.items():
        for phase in measured.phases:
            add("phase", way, f"{phase}: seconds", measured.median_s(phase))
            for number, step in enumerate(measured.seconds, start=2):  # to judge differences of medians by
                if phase in step:
                    add("phase of a step", way, f"{phase}: seconds, step {number}", step[phase])
        for phase in measured.peaks_gib:
            add("memory", way, f"{phase}: peak GPU GiB", measured.peaks_gib[phase])
        for name, logged in HOST_MEMORY.items():
            add("memory", way, name, max(step[logged] for step in measured.metrics))
        for name in ("train/num_tokens", "train/loss", "train/grad_norm"):
            add("step", way, name, statistics.median(step[name] for step in measured.metrics))
        for (phase, target), quantities in measured.moves.items():
            for quantity, value in quantities.items():
                add("move", way, f"{phase}/{target}/{quantity}", value)
        for direction, share in exposed_shares(measured.metrics).items():
            bar = EXPOSED_SHARE_BAR if WAYS[way] else None
            add("exposure", way, f"optimizer_{direction}_exposed_share", share, bar)
    for phase in ways["ours"].phases:
        add("ratio", "staged/ours", f"{phase}: seconds", ratio(ways, phase))
    return rows


def exposed_shares(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the exposed share of the copies of optimizer state, as medians over the steps.

    Returns:
        Shares by direction: back to the GPU for training (h2d), and to the host for the recipe's phase (d2h).
    """
    shares: dict[str, list[float]] = {}
    for step in metrics:
        for (phase, target), quantities in median_moves([step]).items():
            if target == "optimizer_state" and "copy_s" in quantities:
                direction = "h2d" if phase == "train" else "d2h"
                shares.setdefault(direction, []).append(quantities["exposed_s"] / quantities["copy_s"])
    return {direction: statistics.median(of_steps) for direction, of_steps in shares.items()}


def ratio(ways: Mapping[str, Measured], phase: str) -> float:
    """Returns how many times longer a phase takes where optimizer state is not page-locked."""
    return ways["staged"].median_s(phase) / ways["ours"].median_s(phase)


def phases_table(ways: Mapping[str, Measured]) -> list[dict[str, TableValue]]:
    """Returns a row for each phase, with the two ways side by side."""
    rows: list[dict[str, TableValue]] = []
    for phase in ways["ours"].phases:
        row: dict[str, TableValue] = {"phase": phase}
        row |= {f"{way} s": round(measured.median_s(phase), 3) for way, measured in ways.items()}
        row |= {"ratio": round(ratio(ways, phase), 2)}
        row |= {f"{way} GiB": round(m.peaks_gib[phase], 2) for way, m in ways.items() if phase in m.peaks_gib}
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
