"""Do NeMo-RL's recipes train with this package on one GPU, changed only where the machine and the time require it?

python benchmarks/nemo_rl_runs.py --folder nemo-rl-recipes [--output docs/results/nemo_rl_runs.json]
python benchmarks/nemo_rl_runs.py --folder nemo-rl-recipes --cases context_parallel context_parallel_sft async --append

The folder is a copy of examples/configs of NVIDIA-NeMo/RL, or a part of it. A GRPO, an SFT and a DPO recipe run one
after the other with the scripts in examples/, then GRPO on word problems with gsm8k's columns. The number of steps is
cut, the model has the recipe's architecture with random weights, and data and tokenizer are local. `--scale own` uses
the sizes of the recipe's model, `small` those of a small model of its family, and `tiny` is for a trial without a GPU.
Each row lists the overrides that were needed.

With `--append` a result keeps the rows of cases that are not run now. Memory and GPU readings count all processes on a
GPU: runs at the same time need separate GPUs (CUDA_VISIBLE_DEVICES) and `--work` folders, or each row counts both.
"""

import argparse
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # for the runs; else Ray builds a second venv

from gpu_watch import GpuWatch
from model_shapes import LLAMA_1B, QWEN2_0_5B, QWEN2_1_5B, QWEN3_0_6B, SIZES_OF_NAME, TINY_SIZES
from nemo_rl_data import VOCABULARY, in_hydra, write_datasets, write_tokenizer
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.config import load
from nemo_offload_rl.config.keys.schema_problems import ABSENT, value_at
from nemo_offload_rl.metrics.logger import METRICS_FILE, MetricRow, read_metrics

Row = dict[str, TableValue]

REPOSITORY = Path(__file__).resolve().parents[1]
END_S = 60
"""Seconds that a run has to end by itself once its time is over."""

# A small model of each family, by model_type, that replaces the one a recipe names.
SMALL: Mapping[str, Mapping[str, Any]] = {"qwen2": QWEN2_1_5B, "qwen3": QWEN3_0_6B, "llama": LLAMA_1B}
# A key, its value on one GPU without a network, and without checkpoints of random weights.
ONE_GPU: Mapping[str, Any] = {
    "policy.megatron_cfg.tensor_model_parallel_size": 1,
    "policy.megatron_cfg.pipeline_model_parallel_size": 1,
    "policy.megatron_cfg.expert_model_parallel_size": 1,
    "policy.megatron_cfg.sequence_parallel": False,
    "policy.generation.vllm_cfg.tensor_parallel_size": 1,
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 1,
    "logger.wandb_enabled": False,
    "checkpointing.enabled": False,
}
TWO_RANKS: Sequence[str] = ("cluster.gpus_per_node=2", "policy.megatron_cfg.context_parallel_size=2")
# Rows of as many tokens a rank as the recipe's, and YaRN's factor.
SHORTER_ROWS: Mapping[str, Sequence[str]] = {
    "context_parallel": (
        "policy.max_total_sequence_length=16384",
        "policy.hf_config_overrides.rope_scaling.original_max_position_embeddings=8192",
    ),
    "context_parallel_sft": ("policy.max_total_sequence_length=32768",),
}
ONE_ENGINE: Sequence[str] = (
    "cluster.gpus_per_node=2",
    "policy.generation.stop_token_ids=null",  # which are another tokenizer's
    "policy.generation.colocated.resources.num_nodes=null",
    "policy.generation.colocated.resources.gpus_per_node=1",
)
# More, by algorithm and scale: answers of random weights never end by themselves, and batches are sized for a GPU.
SHORTER: Mapping[str, Sequence[str]] = {"grpo": ["policy.generation.max_new_tokens=128"], "sft": [], "dpo": []}
ON_A_CPU: Mapping[str, Sequence[str]] = {
    "grpo": [
        "policy.generation.max_new_tokens=16",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "grpo.max_val_samples=8",
        "grpo.val_batch_size=8",
        "policy.train_global_batch_size=16",
    ],
    "sft": ["policy.train_global_batch_size=16", "sft.val_global_batch_size=16"],
    "dpo": ["policy.train_global_batch_size=8"],
}
# Readings are frequent enough that each step of a second has one.
GPU_READINGS: Sequence[str] = (
    "logger.monitor_gpus=true",
    "logger.gpu_monitoring.collection_interval=1",
    "logger.gpu_monitoring.flush_interval=1",
)
SAVES: Sequence[str] = ("checkpointing.enabled=true", "checkpointing.save_period=10")
WORD_PROBLEMS: Sequence[str] = (
    *GPU_READINGS,
    *SAVES,
    "policy.generation.max_new_tokens=64",
    "grpo.num_prompts_per_step=8",
    "grpo.max_num_epochs=100",
    "policy.train_global_batch_size=128",
    "data.train.dataset_name=gsm8k",
    "data.validation={dataset_name: gsm8k, split: test}",
    "data.default.prompt_file=null",
    "data.default.system_prompt_file=examples/prompts/gsm8k.txt",
)

# The vocabulary is only the tokenizer's, so that some answers are right by chance and the model can learn.
GUESSING_MODEL: Mapping[str, Any] = QWEN2_0_5B | {"vocab_size": VOCABULARY}


@dataclass(frozen=True)
class Case:
    """Describes one run.

    Attributes:
        name: of the run.
        recipe: its YAML file, relative to the folder of recipes.
        steps: that it takes.
        overrides: that say what this run is about.
        model: sizes of its model; None for those that belong to the recipe's.
    """

    name: str
    recipe: str
    steps: int
    overrides: Sequence[str] = ()
    model: Mapping[str, Any] | None = None


_GRPO = "grpo_math_1B_megatron.yaml"
_SFT = "recipes/llm/sft-llama3.1-8b-1n8g-megatron-seqpack.yaml"
_DPO = "recipes/llm/dpo-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs.yaml"
_LONG_GRPO = "recipes/llm/grpo-qwen2.5-1.5B-4n8g-megatron-yarn-256k.yaml"
_LONG_SFT = "recipes/llm/sft-qwen3-0.6B-1n8g-megatron-yarn-128k.yaml"
_ASYNC = "recipes/llm/performance/grpo-llama3.1-8b-instruct-2n8g-async-1off.yaml"
CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("grpo", _GRPO, 3, GPU_READINGS),
        Case("sft", _SFT, 10),
        Case("dpo", _DPO, 10),
        Case("gsm8k", _GRPO, 20, WORD_PROBLEMS, GUESSING_MODEL),
        Case("context_parallel", _LONG_GRPO, 3, (*TWO_RANKS, *SHORTER_ROWS["context_parallel"])),
        Case("context_parallel_sft", _LONG_SFT, 10, (*TWO_RANKS, *SHORTER_ROWS["context_parallel_sft"])),
        Case("async", _ASYNC, 3, ONE_ENGINE),
    )
}
"""By name; the last three need two GPUs."""
ON_ONE_GPU = ("grpo", "sft", "dpo", "gsm8k")


def main() -> None:
    """Runs every case and writes the result after each."""
    arguments = parse_arguments()
    work: Path = arguments.work
    write_datasets(work / "data")
    write_tokenizer(work / "tokenizer")
    rows: list[Row] = []
    with GpuWatch() as watch:
        for name in arguments.cases:
            case = CASES[name] if arguments.steps is None else replace(CASES[name], steps=arguments.steps)
            rows.append(row_of(case, arguments, work, watch))
            write_result(arguments.output, rows, append_by=("case",) if arguments.append else ())
    print_rows([{name: value for name, value in row.items() if name != "overrides"} for row in rows])


def row_of(case: Case, arguments: argparse.Namespace, work: Path, watch: GpuWatch) -> Row:
    """Runs a case until it ends or its time is up, and returns its row."""
    path = arguments.folder / case.recipe
    recipe = load(path)
    model_name = recipe.config["policy"]["model_name"]
    model = hf_config(case, model_name, arguments.scale)
    overrides = [
        *overrides_of(case, recipe.config, recipe.algorithm, arguments.scale, work),
        *(change.partition(":")[2] for change in arguments.change if change.startswith(f"{case.name}:")),
    ]
    command = [sys.executable, f"examples/run_{recipe.algorithm}.py", "--config", str(path.resolve()), *overrides]
    print(f"{case.name}: {shlex.join(command)}", flush=True)
    log, log_dir, checkpoints = work / f"{case.name}.log", work / "logs" / case.name, work / "checkpoints" / case.name
    for folder in (log_dir, checkpoints):  # an earlier run's, whose figures are not this one's, nor its checkpoints
        shutil.rmtree(folder, ignore_errors=True)
    peaks_gib: dict[str, float] = {}
    start = time.perf_counter()
    with watch.peak(case.name, peaks_gib):
        status = status_of(command, log, arguments.limit_s)
    seconds = time.perf_counter() - start
    row: Row = {
        "case": case.name,
        "recipe": case.recipe,
        "algorithm": recipe.algorithm,
        "named_model": model_name,
        "scale": arguments.scale,
        "sizes": f"{model['model_type']}, {model['num_hidden_layers']} layers of {model['hidden_size']}",
        "status": status,
        "seconds": round(seconds, 1),
        "peak_gpu_gib": round(peaks_gib[case.name], 2) if case.name in peaks_gib else None,
        **figures(log_dir),
        "checkpoints": len(list(checkpoints.glob("step_*"))),
        "overrides": shlex.join(overrides),
    }
    print(f"{case.name}: {row['status']}, {row['steps']} steps, {seconds:.0f} s", flush=True)
    return row


def overrides_of(case: Case, config: Mapping[str, Any], algorithm: str, scale: str, work: Path) -> list[str]:
    """Returns the overrides that a recipe needs to run here.

    Args:
        case: the run.
        config: the recipe's, as it loads unchanged.
        algorithm: of the recipe.
        scale: of the model.
        work: the folder with data and tokenizer.
    """
    work = Path(os.path.relpath(work, REPOSITORY))  # where runs are started
    one_gpu = [
        f"{key}={in_hydra(value)}" for key, value in ONE_GPU.items() if value_at(config, key) not in (ABSENT, value)
    ]
    overrides = [
        f"{algorithm}.max_num_steps={case.steps}",
        f"+policy.hf_config={in_hydra(hf_config(case, config['policy']['model_name'], scale))}",
        f"policy.tokenizer.name={work / 'tokenizer'}",
        f"+data.dataset_root={work / 'data'}",
        f"logger.log_dir={work / 'logs' / case.name}",
        *one_gpu,
        *SHORTER[algorithm],
        *case.overrides,
        *([f"checkpointing.checkpoint_dir={work / 'checkpoints' / case.name}"] if SAVES[0] in case.overrides else ()),
        *(ON_A_CPU[algorithm] if scale == "tiny" else ()),
    ]
    return list({override.partition("=")[0]: override for override in overrides}.values())  # the last of a key


def hf_config(case: Case, model_name: str, scale: str) -> dict[str, Any]:
    """Returns the model's config: the sizes of a scale, and a vocabulary that fits the tokenizer."""
    known = [name for name, sizes in SIZES_OF_NAME.items() if sizes["model_type"] in SMALL]
    if case.model is None and model_name not in known:
        raise SystemExit(f"{case.recipe} names the model {model_name}; sizes are known of {', '.join(known)}.")
    own = SIZES_OF_NAME[model_name] if case.model is None else case.model
    small = SMALL[own["model_type"]] if case.model is None else case.model
    if scale == "tiny":
        return {**small, **TINY_SIZES, "vocab_size": VOCABULARY}
    return dict(own if scale == "own" else small)


def status_of(command: Sequence[str], log: Path, limit_s: float) -> str:
    """Runs a command and writes its output to a file.

    Args:
        command: of the run.
        log: the file.
        limit_s: seconds after which it is asked to end, and then ended.

    Returns:
        `done`, or what went wrong, with the output's last line that names an error, or else the last one.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,  # prompt files are named from there
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        in_time = True
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            in_time = False
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if in_time and process.returncode == 0:
        return "done"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    what = f"exit status {process.returncode}" if in_time else f"not done after {limit_s:g} s"
    errors = [line for line in lines if "Error" in line]
    return f"{what}: {(errors or lines or ['no output'])[-1]}"


def figures(log_dir: Path) -> Row:
    """Reads what a run has logged from the only folder of its log_dir."""
    rows = [row for row in read_metrics(log_dir / "exp_001" / METRICS_FILE) if "train/loss" in row]

    def logged(name: str) -> list[float]:
        return [value for row in rows if (value := row.get(name)) is not None]

    result: Row = {"steps": len(rows)}
    if seconds := logged("timing/train/total_step_time"):
        result["median_step_s"] = round(statistics.median(seconds), 2)
    if losses := logged("train/loss"):
        result |= {"first_loss": round(losses[0], 5), "last_loss": round(losses[-1], 5)}
    if rewards := logged("train/reward"):
        result |= {"mean_reward": round(statistics.mean(rewards), 5), "last_reward": round(rewards[-1], 5)}
    if unjudged := logged("train/num_unjudged_answers"):
        result["unjudged_answers"] = int(sum(unjudged))
    if errors := logged("train/token_mult_prob_error"):
        result["largest_token_mult_prob_error"] = round(max(errors), 5)
    if saves := logged("timing/train/checkpointing"):
        result["exposed_checkpointing_s"] = round(sum(saves), 2)
    return result | gpu_figures(rows)


def gpu_figures(rows: Sequence[MetricRow]) -> Row:
    """Summarizes what `logger.monitor_gpus` wrote into the rows of steps, over all GPUs together.

    Args:
        rows: Of metrics.jsonl; each has a value of what was read since the row before, a mean or the largest.

    Returns:
        The number of steps that have readings; if there are any, the mean utilisation, and the largest values of the
        others, of which the power is a mean of a step.
    """
    read: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if name.startswith("performance/gpus/") and value is not None:
                read[name.rpartition("/")[2]].append(value)
    result: Row = {
        "steps_with_gpu_readings": sum(any(name.startswith("performance/gpus/") for name in row) for row in rows)
    }
    if used := read["utilization_percent"]:
        result["mean_gpu_utilization_percent"] = round(statistics.mean(used), 1)
    for name, unit_digits in {"power_w": 1, "memory_gib": 2, "temperature_c": 0}.items():
        if values := read[name]:
            result[f"largest_gpu_{name}"] = round(max(values), unit_digits)
    return result


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="NeMo-RL's examples/configs")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=ON_ONE_GPU, help="all of one GPU by default")
    parser.add_argument("--scale", choices=["own", "small", "tiny"], default="small", help="sizes of the model")
    parser.add_argument("--steps", type=int, help="instead of those of each case")
    parser.add_argument(
        "--change", nargs="+", default=[], metavar="CASE:key=value", help="further overrides, such as those of batches"
    )
    parser.add_argument("--limit-s", type=float, default=330.0, help="seconds that one run may take")
    parser.add_argument("--work", type=Path, default=Path("build/nemo_rl_runs"), help="for data, tokenizer and logs")
    parser.add_argument("--output", type=Path, default=Path("build/nemo_rl_runs.json"), help="the JSON file")
    parser.add_argument("--append", action="store_true", help="keep the rows that the JSON file has of other cases")
    return parser.parse_args()


if __name__ == "__main__":
    main()
