"""How long is a step of asynchronous GRPO beside a synchronous one, and does it learn as well?

    python benchmarks/async_grpo.py --output build/async_grpo.json
    python benchmarks/async_grpo.py --config benchmarks/recipes/grpo_1_5B_random.yaml --stop-tokens 800 \
        --settings sync 1 1-in-flight --append policy.generation.backend=vllm grpo.max_num_steps=6

Runs a recipe once in each setting, one run after the other, with generation on devices of its own, or with --same-gpu
on the policy's (`gpus` apart, shared): synchronously, and asynchronously with each
`grpo.async_grpo.max_trajectory_age_steps`, with weights in flight or not. Seconds are medians of the steps after the
first, without validation and checkpoints.

Columns: `generation_s`: sampling and rewards of a step; `training_s`: its log-probs and training; `wait_s`: how long
it waited for rollouts; `pause_ms`: how long generation was held up for new weights; `mean_age`: of the answers, in
updates; `accuracy`: of the last validation; `steps`: of the run, which ends at the recipe's target; `whole_s`: all of
its steps, with validations; `host_growth_mib` and `gpu_growth_mib`: memory of policy and engine in the last quarter of
the steps over that in the second (medians).
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl_data import write_tokenizer
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.metrics.logger import METRICS_FILE, MetricRow, read_metrics

ROOT = Path(__file__).parents[1]
SYNC = "sync"
IN_FLIGHT = "-in-flight"
"""The end of a setting whose weights are sent while answers are being generated."""
UNCORRECTED = "-uncorrected"
"""The end of a setting whose loss takes older answers for the policy's own, which recipes must not ask for."""
_WITHOUT_ITS_RULE = """
import runpy, sys
from nemo_offload_rl.config.rules import RULES
from nemo_offload_rl.config.rules.grpo import grpo_async_correction
RULES[:] = [rule for rule in RULES if rule.check is not grpo_async_correction]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_COMPARED = ("loss_fn.use_importance_sampling_correction=true", "checkpointing.enabled=false")
_APART = (
    "cluster.gpus_per_node=2",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
)
_PHASES: Mapping[str, Sequence[str]] = {
    "generation_s": (
        "timing/train/sampling",
        "timing/train/rewards",
        "timing/rollouts/sampling",
        "timing/rollouts/rewards",
    ),
    "training_s": ("timing/train/logprobs", "timing/train/reference_logprobs", "timing/train/training"),
    "wait_s": ("timing/train/wait_for_rollouts",),
}
_HELD = "timing/rollouts/held_for_weights"
_WHOLE, _REFIT, _AGE = "timing/train/total_step_time", "timing/train/refit", "train/avg_trajectory_age"
_NOT_OF_A_STEP = ("timing/train/validation", "timing/train/checkpointing")
_MEMORY: Mapping[str, Sequence[str]] = {
    name: tuple(f"performance/memory/{owner}/{counter}" for owner in ("policy", "generation"))
    for name, counter in {"host_growth_mib": "host_rss_gib", "gpu_growth_mib": "gpu_driver_gib"}.items()
}


def run(recipe: Path, setting: str, placed: Sequence[str], overrides: Sequence[str], folder: Path) -> list[MetricRow]:
    """Runs the recipe in one setting; returns its metrics, one row a step.

    Raises:
        subprocess.CalledProcessError: the run failed; what it printed is above.
    """
    ahead, python = [], [sys.executable]
    if setting != SYNC:
        age, in_flight = setting.partition("-")[0], str(IN_FLIGHT in setting).lower()
        section = f"enabled: true, max_trajectory_age_steps: {age}, in_flight_weight_updates: {in_flight}"
        ahead = [f"grpo.async_grpo={{{section}}}"]
    if UNCORRECTED in setting:
        ahead.append("loss_fn.use_importance_sampling_correction=false")
        python += ["-c", _WITHOUT_ITS_RULE]
    command = [*python, str(ROOT / "examples" / "run_grpo.py"), "--config", str(recipe)]
    subprocess.run([*command, *_COMPARED, *placed, *ahead, f"logger.log_dir={folder}", *overrides], check=True)
    (metrics,) = folder.glob(f"exp_*/{METRICS_FILE}")
    return read_metrics(metrics)


def row_of(setting: str, rows: Sequence[MetricRow]) -> dict[str, TableValue]:
    """Returns a row of the table from a run's metrics."""
    steps = [row for row in rows if row.get(_WHOLE) is not None and row["step"]]
    later = steps[1:] or steps
    accuracies = [value for row in rows if (value := row.get("validation/accuracy")) is not None]

    def median(names: Sequence[str]) -> float:
        return round(statistics.median(_sum(row, names) for row in later), 3)

    return {
        "setting": setting
        if setting == SYNC
        else "async, age " + setting.replace(IN_FLIGHT, ", in flight").replace(UNCORRECTED, ", uncorrected"),
        "steps": len(steps),
        "accuracy": round(accuracies[-1], 3) if accuracies else None,
        "whole_s": round(sum(_sum(row, (_WHOLE,)) for row in steps), 1),
        "step_s": round(statistics.median(_sum(row, (_WHOLE,)) - _sum(row, _NOT_OF_A_STEP) for row in later), 3),
        **{name: median(names) for name, names in _PHASES.items()},
        "pause_ms": round(1e3 * median((_HELD if IN_FLIGHT in setting else _REFIT,)), 1),
        "mean_age": round(statistics.mean(_sum(row, (_AGE,)) for row in steps), 2),
        **{name: _growth_mib(steps, names) for name, names in _MEMORY.items()},
    }


def _growth_mib(steps: Sequence[MetricRow], names: Sequence[str]) -> float:
    quarter = max(1, len(steps) // 4)
    last, second = steps[-quarter:], steps[quarter : 2 * quarter] or steps[:1]
    return round(
        1024
        * (statistics.median(_sum(row, names) for row in last) - statistics.median(_sum(row, names) for row in second)),
        1,
    )


def _sum(row: MetricRow, names: Sequence[str]) -> float:
    return sum(value for name in names if (value := row.get(name)) is not None)


def parsed_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--config", type=Path, default=ROOT / "examples" / "configs" / "grpo_tiny_cpu.yaml", help="a recipe"
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        type=_setting,
        metavar="SETTING",
        default=[SYNC, "0", "1", "4"],
        help=f"sync, or the largest age, perhaps with {IN_FLIGHT} or {UNCORRECTED}",
    )
    parser.add_argument("--output", type=Path, default=Path("build/async_grpo.json"), help="the result file")
    parser.add_argument("--same-gpu", action="store_true", help="generate on the policy's GPUs, beside its training")
    parser.add_argument(
        "--stop-tokens",
        type=int,
        default=0,
        metavar="N",
        help="answers also end at each of N tokens of a written tokenizer, so that random weights give uneven lengths",
    )
    parser.add_argument("--append", action="store_true", help="keep the file's rows of other recipes and settings")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe")
    return parser.parse_args()


def _setting(text: str) -> str:
    if text != SYNC and not text[0].isdigit():
        raise argparse.ArgumentTypeError(f"{text} is neither {SYNC} nor an age; overrides come before the options")
    return text


def main() -> int:
    """Runs each setting, writes the result after each, and prints the rows; returns the exit status."""
    arguments = parsed_arguments()
    rows: list[dict[str, TableValue]] = []
    placed = () if arguments.same_gpu else _APART
    overrides = [*arguments.overrides]
    if arguments.stop_tokens:
        tokenizer = arguments.output.with_suffix("") / "tokenizer"
        stops = write_tokenizer(tokenizer, arguments.stop_tokens)
        overrides += [f"policy.tokenizer.name={tokenizer}", f"policy.generation.stop_token_ids={[*stops]}"]
    for setting in arguments.settings:
        with tempfile.TemporaryDirectory() as folder:
            measured = run(arguments.config, setting, placed, overrides, Path(folder))
        row = {"recipe": arguments.config.name, "gpus": "shared" if arguments.same_gpu else "apart"}
        rows.append({**row, **row_of(setting, measured)})
        write_result(arguments.output, rows, append_by=("recipe", "gpus", "setting") if arguments.append else ())
    print_rows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
