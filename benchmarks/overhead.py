"""How much does the framework add to a GRPO step of the tiny recipe, compared with plain torch and transformers?

python benchmarks/overhead.py [--steps 20] [--rounds 3] [--output docs/results/overhead_cpu.json] [key=value ...]

The two take turns in one run on one machine, with the same number of threads, problems, model, batch sizes and
optimizer. A round is `steps` steps of each; a row is the median over all of its steps. The framework runs what `make
grpo` runs: a policy worker and a generation engine, each in a Ray process.
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0"
)  # before Ray is imported; else `uv run` builds a second venv

import torch
from plain_grpo import PlainGRPO
from result_file import write_result
from rich.console import Console
from rich.table import Table

from nemo_offload_rl import config
from nemo_offload_rl.algorithms import grpo
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.problem import Problem
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.run.setup import read_data, with_run_length

RECIPE = Path(__file__).parents[1] / "examples" / "configs" / "grpo_tiny_cpu.yaml"
# The recipe skips this pass; most recipes cannot, so both sides run it.
LOG_PROB_PASS = "loss_fn.force_on_policy_ratio=false"
WARM_UP_STEPS = 3
WHOLE_STEP = "whole step"
# The framework's names for the passes that both sides have.
PASSES = {
    "sampling": "generation",
    "rewards": "rewards and advantages",
    "logprobs": "log-probs",
    "training": "training",
    "refit": "weight copy",
}

Seconds = dict[str, float]
Step = Callable[[], Seconds]


def main() -> None:
    """Measures, prints the table, writes the result."""
    arguments = parse_arguments()
    recipe: Any = config.load(arguments.config, ["~warm_start", LOG_PROB_PASS, *arguments.overrides]).config
    if torch.cuda.is_available():
        raise SystemExit("This benchmark compares CPU runs; hide the GPUs: CUDA_VISIBLE_DEVICES= python ...")
    recipe, notes = config.for_machine(recipe, has_gpus=False)
    console = Console()
    for note in notes:
        console.print(note)
    preparation = grpo.prepare(recipe)
    with Cluster(num_nodes=1, gpus_per_node=1) as cluster:
        torch.set_num_threads(cluster.threads_per_node)
        policy = with_run_length(recipe["policy"], preparation.schedule.num_steps)
        algorithm: Any = preparation.build(policy, cluster)
        try:
            seconds = take_turns(
                {"plain": plain_step(recipe), "framework": framework_step(algorithm)},
                arguments.steps,
                arguments.rounds,
            )
        finally:
            algorithm.shutdown()
        num_threads = cluster.threads_per_node
    rows = compare(seconds["plain"], seconds["framework"], num_threads)
    console.print(table_of(rows))
    write_result(arguments.output, rows)
    console.print(f"written to {arguments.output}")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=RECIPE, help="a GRPO recipe for a CPU")
    parser.add_argument("--steps", type=int, default=20, help="steps of each side in a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds")
    parser.add_argument("--output", type=Path, default=Path("build/overhead-cpu.json"), help="the result file")
    parser.add_argument("overrides", nargs="*", help="overrides of the recipe, key=value")
    return parser.parse_args()


def plain_step(recipe: Any) -> Step:
    """Runs one step of the plain baseline, on the recipe's problems in the recipe's order."""
    section, policy, loss = recipe["grpo"], recipe["policy"], recipe["loss_fn"]
    tokenizer = load_tokenizer(policy["tokenizer"]["name"])
    problems: Any = read_data(recipe["data"], section["seed"])[0]  # the recipe's are `Problem`s
    trainer = PlainGRPO(
        policy,
        num_generations=section["num_generations_per_prompt"],
        ratio_clip=(loss["ratio_clip_min"], loss["ratio_clip_max"]),
        eos_token_id=tokenizer.eos_token_id,
        seed=section["seed"],
    )

    def step() -> Seconds:
        prompts, answers = tokenized(problems, section["num_prompts_per_step"], tokenizer)
        return trainer.step(prompts, answers)

    return step


def tokenized(problems: ProblemLoader[Problem], size: int, tokenizer: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """Returns the next prompts, int64 [size, length], and the answers' token ids with the end of sequence."""
    batch = problems.next_batch(size)
    prompts = [tokenizer(problem.prompt, add_special_tokens=False)["input_ids"] for problem in batch]
    answers = [tokenizer(problem.answer, add_special_tokens=False)["input_ids"] for problem in batch]
    return torch.tensor(prompts), [[*answer, tokenizer.eos_token_id] for answer in answers]


def framework_step(algorithm: grpo.GRPO) -> Step:
    """Runs one step as a run does; the phases have the baseline's names."""
    numbers = itertools.count(1)

    def step() -> Seconds:
        timer = Timer()
        with timer.phase(WHOLE_STEP):
            algorithm.step(next(numbers), timer)
        seconds = timer.seconds()
        return {ours: seconds[theirs] for theirs, ours in PASSES.items()} | {WHOLE_STEP: seconds[WHOLE_STEP]}

    return step


def take_turns(sides: dict[str, Step], num_steps: int, num_rounds: int) -> dict[str, list[Seconds]]:
    """Warms both sides up, then alternates between them, so that other load on the machine affects both."""
    for step in sides.values():
        for _ in range(WARM_UP_STEPS):
            step()
    seconds: dict[str, list[Seconds]] = {name: [] for name in sides}
    for _ in range(num_rounds):
        for name, step in sides.items():
            seconds[name] += [step() for _ in range(num_steps)]
    return seconds


def compare(plain: Sequence[Seconds], framework: Sequence[Seconds], num_threads: int) -> list[dict[str, float | str]]:
    """Returns one row for each pass: both medians, and the framework's divided by the plain one's."""
    rows: list[dict[str, float | str]] = []
    for name in [*PASSES.values(), WHOLE_STEP]:
        plain_s = statistics.median(seconds[name] for seconds in plain)
        framework_s = statistics.median(seconds[name] for seconds in framework)
        rows.append(
            {
                "pass": name,
                "plain_s": round(plain_s, 5),
                "framework_s": round(framework_s, 5),
                "ratio": round(framework_s / plain_s, 3),
                "num_steps": len(plain),
                "num_threads": num_threads,
            }
        )
    return rows


def table_of(rows: Sequence[dict[str, float | str]]) -> Table:
    """Formats the rows as a table in milliseconds."""
    table = Table(title="A GRPO step of the tiny recipe, median")
    for column in ("pass", "plain ms", "framework ms", "ratio"):
        table.add_column(column, justify="left" if column == "pass" else "right")
    for row in rows:
        if row["pass"] == WHOLE_STEP:
            table.add_section()
        cells = (f"{1000 * float(row['plain_s']):.1f}", f"{1000 * float(row['framework_s']):.1f}")
        table.add_row(str(row["pass"]), *cells, f"{float(row['ratio']):.2f}")
    return table


if __name__ == "__main__":
    main()
