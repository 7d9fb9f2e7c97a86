"""Do recipes of NeMo-RL train here, on one GPU, with no change but what the machine and the time ask for?

    python benchmarks/nemo_rl_runs.py --folder nemo-rl-recipes [--output docs/results/nemo_rl_runs.json]

The folder is a copy of examples/configs of NVIDIA-NeMo/RL, or a part of it. A GRPO, an SFT and a DPO recipe run one
after the other by the scripts in examples/, then GRPO on word problems with gsm8k's columns. Steps are cut, the model
is one of the recipe's architecture with random weights, and data and tokenizer are local. `--scale own` has the sizes
of the recipe's model, `small` those of a small model of its family, `tiny` is for a try without a GPU. Overrides
that were needed are in each row; beside the JSON the script writes them and the table as Markdown.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # for the runs; else Ray builds a second venv

from gpu_watch import GpuWatch
from model_shapes import LLAMA_1B, QWEN2_0_5B, QWEN2_1_5B, SIZES_OF_NAME, TINY_SIZES
from nemo_rl_data import VOCABULARY, in_hydra, write_datasets, write_tokenizer
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.config import load
from nemo_offload_rl.config.keys.schema_problems import ABSENT, value_at
from nemo_offload_rl.metrics.logger import METRICS_FILE, read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
END_S = 60
"""Seconds that a run has to end by itself once its time is over."""

# A small model of each family, by its model_type, in place of the one that a recipe names.
SMALL: Mapping[str, Mapping[str, Any]] = {"qwen2": QWEN2_1_5B, "llama": LLAMA_1B}
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
# Besides, by algorithm and scale: answers of random weights never end by themselves, and batches are for a GPU.
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
WORD_PROBLEMS: Sequence[str] = (
    "policy.generation.max_new_tokens=64",
    "grpo.num_prompts_per_step=8",
    "grpo.max_num_epochs=100",
    "policy.train_global_batch_size=128",
    "data.train.dataset_name=gsm8k",
    "data.validation={dataset_name: gsm8k, split: test}",
    "data.default.prompt_file=null",
    "data.default.system_prompt_file=examples/prompts/gsm8k.txt",
)

# Its vocabulary is the tokenizer's alone, so that some answers are right by chance and there is something to learn.
GUESSING_MODEL: Mapping[str, Any] = QWEN2_0_5B | {"vocab_size": VOCABULARY}


@dataclass(frozen=True)
class Case:
    """A run.

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


def main() -> None:
    """Runs every case and writes the result after each."""
    arguments = parse_arguments()
    work: Path = arguments.work
    write_datasets(work / "data")
    write_tokenizer(work / "tokenizer")
    rows: list[dict[str, TableValue]] = []
    with GpuWatch() as watch:
        for case in cases(arguments):
            rows.append(row_of(case, arguments, work, watch))
            write_result(arguments.output, rows)
            page = page_of(json.loads(arguments.output.read_text()), arguments.output.name)
            arguments.output.with_suffix(".md").write_text(page)
    print_rows([{name: value for name, value in row.items() if name != "overrides"} for row in rows])


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """The runs that the command line asks for."""
    every = [
        Case("grpo", arguments.grpo, arguments.grpo_steps),
        Case("sft", arguments.sft, arguments.sft_steps),
        Case("dpo", arguments.dpo, arguments.dpo_steps),
        Case("gsm8k", arguments.grpo, arguments.gsm8k_steps, WORD_PROBLEMS, GUESSING_MODEL),
    ]
    yield from (case for case in every if case.name in arguments.cases)


def row_of(case: Case, arguments: argparse.Namespace, work: Path, watch: GpuWatch) -> dict[str, TableValue]:
    """Runs a case to its end, or to the end of its time."""
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
    log, log_dir = work / f"{case.name}.log", work / "logs" / case.name
    shutil.rmtree(log_dir, ignore_errors=True)  # figures of an earlier run are not this one's
    peaks_gib: dict[str, float] = {}
    start = time.perf_counter()
    with watch.peak(case.name, peaks_gib):
        status = status_of(command, log, arguments.limit_s)
    seconds = time.perf_counter() - start
    row: dict[str, TableValue] = {
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
        "overrides": shlex.join(overrides),
    }
    print(f"{case.name}: {row['status']}, {row['steps']} steps, {seconds:.0f} s", flush=True)
    return row


def overrides_of(case: Case, config: Mapping[str, Any], algorithm: str, scale: str, work: Path) -> list[str]:
    """What a recipe has to be changed in for a run here.

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
        *(ON_A_CPU[algorithm] if scale == "tiny" else ()),
    ]
    return list({override.partition("=")[0]: override for override in overrides}.values())  # the last of a key


def hf_config(case: Case, model_name: str, scale: str) -> dict[str, Any]:
    """The model's config: sizes of a scale, and room for the tokenizer."""
    known = [name for name, sizes in SIZES_OF_NAME.items() if sizes["model_type"] in SMALL]
    if case.model is None and model_name not in known:
        raise SystemExit(f"{case.recipe} names the model {model_name}; sizes are known of {', '.join(known)}.")
    own = SIZES_OF_NAME[model_name] if case.model is None else case.model
    small = SMALL[own["model_type"]] if case.model is None else case.model
    if scale == "tiny":
        return {**small, **TINY_SIZES, "vocab_size": VOCABULARY}
    return dict(own if scale == "own" else small)


def status_of(command: Sequence[str], log: Path, limit_s: float) -> str:
    """Runs a command with its output in a file.

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


def figures(log_dir: Path) -> dict[str, TableValue]:
    """What a run has logged, in the only folder of its log_dir."""
    rows = [row for row in read_metrics(log_dir / "exp_001" / METRICS_FILE) if "train/loss" in row]

    def logged(name: str) -> list[float]:
        return [value for row in rows if (value := row.get(name)) is not None]

    result: dict[str, TableValue] = {"steps": len(rows)}
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
    return result


def page_of(result: Mapping[str, Any], data: str) -> str:
    """The result as a Markdown page.

    Args:
        result: as in the JSON file.
        data: name of that file.
    """
    rows = result["rows"]
    done = sum(row["status"] == "done" for row in rows)
    names = {
        "algorithm": "algorithm",
        "steps": "steps",
        "seconds": "s, all",
        "median_step_s": "s, a step",
        "first_loss": "first loss",
        "last_loss": "last loss",
        "mean_reward": "mean reward",
        "peak_gpu_gib": "peak GPU GiB",
    }
    lines = [
        "# Runs of NeMo-RL's recipes",
        "",
        "Do recipes of NeMo-RL train here, on one GPU, with no change but what the machine and the time ask for? Of "
        f"{len(rows)} runs {done} {'is' if done == 1 else 'are'} done.",
        "",
        table_line(["run", *names.values()]),
        table_line(["---"] * (1 + len(names))),
        *(table_line([row["case"], *(cell(row, name) for name in names)]) for row in rows),
        "",
        "## Overrides that were needed",
        "",
        *(line for row in rows for line in override_lines(row)),
        "## How it was measured",
        "",
        "Each run is a process of its own, by the script of `examples/` for its algorithm; its seconds contain its "
        "start. Models have random weights. Data of the datasets' columns, made from templates, and a tokenizer of "
        f"{VOCABULARY} tokens lie in a local folder. Memory is the largest reading of the driver's count.",
        "",
        f"- machine: {result['machine']}",
        f"- commit: {result['commit']}, {result['date']}",
        f"- command: `{result['command']}`",
        f"- [{data}]({data}) has each run with the whole of its overrides.",
        "",
        "## What it does not say",
        "",
        "Nothing of learning: a model with random weights earns next to no reward, and batches and steps are few.",
    ]
    return "\n".join(textwrap.fill(line, 120) if is_prose(line) else line for line in lines) + "\n"


def is_prose(line: str) -> bool:
    """Whether lines may be broken in it."""
    return not line.startswith(("#", "|", "-", " "))


def cell(row: Mapping[str, Any], name: str) -> str:
    """A row's value, `-` where it has none."""
    return "-" if row.get(name) is None else str(row[name])


def override_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """A run's recipe with its overrides, a line each."""
    ending = "" if row["status"] == "done" else f" Its end: {row['status']}"
    yield f"`{row['case']}` runs `{row['recipe']}` with {row['sizes']}, for {row['named_model']}.{ending}"
    yield ""
    for override in shlex.split(row["overrides"]):
        first, *others = textwrap.wrap(override, 110, break_long_words=False, break_on_hyphens=False)
        yield f"    {first}"
        yield from (f"        {line}" for line in others)
    yield ""


def table_line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="NeMo-RL's examples/configs")
    names = ["grpo", "sft", "dpo", "gsm8k"]
    parser.add_argument("--cases", nargs="+", default=names, choices=names)
    parser.add_argument("--scale", choices=["own", "small", "tiny"], default="small", help="sizes of the model")
    recipes = {
        "grpo": "grpo_math_1B_megatron.yaml",
        "sft": "recipes/llm/sft-llama3.1-8b-1n8g-megatron-seqpack.yaml",
        "dpo": "recipes/llm/dpo-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs.yaml",
    }
    for name, recipe in recipes.items():
        parser.add_argument(f"--{name}", default=recipe, help="recipe, relative to the folder")
    for name, steps in {"grpo": 3, "sft": 10, "dpo": 10, "gsm8k": 20}.items():
        parser.add_argument(f"--{name}-steps", type=int, default=steps)
    parser.add_argument(
        "--change", nargs="+", default=[], metavar="CASE:key=value", help="further overrides, such as those of batches"
    )
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds that one run may take")
    parser.add_argument("--work", type=Path, default=Path("build/nemo_rl_runs"), help="for data, tokenizer and logs")
    parser.add_argument("--output", type=Path, default=Path("build/nemo_rl_runs.json"), help="the JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
