"""What do GPUs of one host gain together: training of 8 B, and GRPO of a 30 B model with experts beside vLLM?

    python benchmarks/scale.py --train one dp tp cp --output docs/results/scale.json
    python benchmarks/scale.py --grpo tp ep --settings ours upstream_way --append --output docs/results/scale.json
    python benchmarks/scale.py --gpus 2 --model tiny --train one dp tp --grpo tp --scale tiny

`--train` runs training steps of rows of 8,192 tokens, as many a GPU in every layout (weak scaling), with
`context_parallel.py`: `one` GPU, `dp`, `tp` (two ranks share a row), `cp` (the same). `--grpo` runs `colocated.py` with
recipes/grpo_30B_A3B_random.yaml: `tp` shares experts among all ranks and layers between two, with vLLM engines of two
GPUs; `ep` shares experts alone, with one expert-parallel engine. `--cut` keeps 8 of its 48 layers, for two GPUs.

Columns of a training row: those of `context_parallel.py`, and `tokens_per_s_gpu`. Of a GRPO row: seconds of a step and
of its phases, `switch_s` both ways, the refit with its parts and replayed graphs, tokens a second and GPU, GiB beside
the planned (`policy_*`: allocated by the policy's process), and `start_s`: from the command to the first token. All
rows of `colocated.py` are in OUTPUT_LAYOUT.json.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import context_parallel
from colocated_ways.settings import SETTINGS
from result_file import TableValue, print_rows, write_result

Row = dict[str, Any]
BENCHMARKS = Path(__file__).parent
RECIPE = BENCHMARKS / "recipes" / "grpo_30B_A3B_random.yaml"
ROW_TOKENS, ROWS_PER_GPU = 8192, 4
TRAIN = ("one", "dp", "tp", "cp")
GRPO = ("tp", "ep")
CUT = ("policy.hf_config.num_hidden_layers=8", "policy.model_name=qwen3-30B-A3B-8-layers")
_FIGURES: Mapping[str, str] = {
    "step_s": "whole step",
    "generation_s": "sampling",
    "logprobs_s": "logprobs",
    "training_s": "training",
    "refit_in_step_s": "refit",
    "switch_s": "switch both ways",
    "switch_to_training_s": "switch to training",
    "switch_to_generation_s": "switch to generation",
    "refit_s": "refit, by itself",
    "export_s": "refit/export_s of the last switch",
    "load_s": "refit/load_s of the last switch",
    "graphs": "refit/graphs of the last switch",
    "tokens": "train/num_tokens",
    "training_peak_gib": "training: peak GPU memory",
    "training_planned_gib": "training: planned GPU memory",
    "generation_peak_gib": "sampling: peak GPU memory",
    "generation_planned_gib": "sampling: planned GPU memory",
    "refit_peak_gib": "refit: peak GPU memory",
    "refit_planned_gib": "refit: planned GPU memory",
    "policy_train_gib": "performance/memory/policy/gpu_peak_train_gib",
    "policy_train_planned_gib": "train: planned for the policy",
    "policy_logprobs_gib": "performance/memory/policy/gpu_peak_logprobs_gib",
    "policy_logprobs_planned_gib": "logprobs: planned for the policy",
    "policy_refit_gib": "performance/memory/policy/gpu_peak_refit_gib",
    "policy_refit_planned_gib": "refit: planned for the policy",
    "mfu": "model_flop_utilization/training",
    "awake": "the engine stays awake",
    "start_s": "start-up: from the command to the end of first_token",
    "refused": "refused",
}
_EQUAL: Mapping[str, str] = {
    "equal_losses": "losses of all steps are equal",
    "equal_tokens": "greedy tokens are equal",
}


def layout_of(name: str, gpus: int) -> dict[str, int]:
    """Returns the ranks and sizes of a layout of training."""
    sizes = {"one": {"gpus": 1}, "dp": {}, "tp": {"tp": 2}, "cp": {"cp": 2}}[name]
    return {"gpus": gpus, "cp": 1, "tp": 1} | sizes


def overrides_of(name: str, gpus: int) -> list[str]:
    """Returns the overrides of the recipe for a layout of GRPO."""
    tp, engine, experts = {"tp": (2, 2, 1), "ep": (1, gpus, gpus)}[name]
    return [
        f"cluster.gpus_per_node={gpus}",
        f"policy.megatron_cfg.tensor_model_parallel_size={tp}",
        f"policy.megatron_cfg.sequence_parallel={str(tp > 1).lower()}",
        f"policy.megatron_cfg.expert_model_parallel_size={gpus}",
        f"policy.generation.vllm_cfg.tensor_parallel_size={engine}",
        f"policy.generation.vllm_cfg.expert_parallel_size={experts}",
    ]


def train_row(name: str, arguments: argparse.Namespace) -> Row:
    """Measures a layout of training; returns its row."""
    layout = layout_of(name, arguments.gpus)
    num_rows = ROWS_PER_GPU * layout["gpus"]
    tokens = ROW_TOKENS if arguments.model != "tiny" else 64
    case = context_parallel.Case(arguments.model, tokens, num_rows, "recompute", **layout)
    ranks = context_parallel.in_own_processes(case, arguments.steps + 1, profiled=True)
    row: Row = {"layout": name, "part": "train"} | context_parallel.row_of(case, ranks, None)
    return row | {"tokens_per_s_gpu": round(row["tokens_per_s"] / case.gpus, 1)}


def grpo_rows(name: str, arguments: argparse.Namespace) -> list[Row]:
    """Runs GRPO in a layout, in each setting; returns a row each."""
    overrides = [*overrides_of(name, arguments.gpus), *(CUT if arguments.cut else ()), *arguments.overrides]
    if arguments.scale == "tiny":  # a dense model
        of_scale = ["--scale", "tiny", "--model", "tiny"]
        overrides.append("policy.megatron_cfg.expert_model_parallel_size=1")
    else:
        of_scale = ["--config", str(RECIPE), "--model", "30B, 8 of 48 layers" if arguments.cut else "30B"]
    # Not a temporary file: a run that is stopped leaves the settings that it has measured.
    out = arguments.output.with_name(f"{arguments.output.stem}_{name}.json")
    command = [sys.executable, str(BENCHMARKS / "colocated.py"), *of_scale, "--out", str(out)]
    command += ["--backend", arguments.backend, "--settings", *arguments.settings]
    command += ["--steps", str(arguments.steps + 1), "--switches", str(arguments.switches), *overrides]
    out.unlink(missing_ok=True)
    subprocess.run(command, check=False)  # a setting that is refused has a row that says so
    found = json.loads(out.read_text())["rows"]
    return [condensed(name, setting, arguments.gpus, found) for setting in arguments.settings]


def condensed(layout: str, setting: str, gpus: int, found: Sequence[Mapping[str, TableValue]]) -> Row:
    """Returns a setting's row of the table from the rows of `colocated.py`, one a metric."""
    values = {row["metric"]: row["value"] for row in found if row["setting"] == setting}
    both = {row["metric"]: row["value"] for row in found if row["setting"] == "both"}
    row: Row = {"layout": layout, "part": "grpo", "setting": setting, "model": found[0]["model"], "gpus": gpus}
    row |= {name: values[metric] for name, metric in _FIGURES.items() if metric in values}
    if "tokens" in row:
        row["tokens_per_s_gpu"] = round(row["tokens"] / row["step_s"] / gpus, 1)
    return row | {name: both[metric] for name, metric in _EQUAL.items() if metric in both}


def parsed_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=4, help="of all layouts but `one`")
    parser.add_argument("--train", nargs="+", choices=TRAIN, default=[], help="layouts of training")
    parser.add_argument("--model", choices=list(context_parallel.MODELS), default="8b", help="that they train")
    parser.add_argument("--grpo", nargs="+", choices=GRPO, default=[], help="layouts of GRPO")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="of colocated.py")
    parser.add_argument("--cut", action="store_true", help="8 of the recipe's 48 layers")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny for a trial without a GPU")
    parser.add_argument("--backend", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--steps", type=int, default=2, help="that count, after a first one")
    parser.add_argument("--switches", type=int, default=3, help="switches back and forth that count, after a first one")
    parser.add_argument("--append", action="store_true", help="keep the file's rows of cases that are not measured now")
    parser.add_argument("--output", type=Path, default=Path("build/scale.json"), help="the result file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the GRPO recipe")
    arguments = parser.parse_intermixed_args()
    if arguments.gpus % 2:
        parser.error(f"--gpus {arguments.gpus}: in some layouts two GPUs share a row or a layer; give an even number")
    return arguments


def main() -> int:
    """Measures every layout, and writes the result after each; returns the exit status."""
    arguments = parsed_arguments()
    case = ("part", "layout", "setting", "model", "gpus")
    rows: list[Row] = []

    def add(measured: Sequence[Row]) -> None:
        rows.extend(measured)
        write_result(arguments.output, rows, append_by=case if arguments.append else ())
        print_rows([row for row in rows if row["part"] == measured[0]["part"]])

    for name in arguments.train:
        add([train_row(name, arguments)])
    for name in arguments.grpo:
        add(grpo_rows(name, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
