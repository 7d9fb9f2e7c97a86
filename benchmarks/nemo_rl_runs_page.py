"""Formats the page of benchmarks/nemo_rl_runs.py: a table with one row for each run, and the overrides of each."""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl_data import VOCABULARY


def page_of(result: Mapping[str, Any], data: str) -> str:
    """Formats the result as a Markdown page.

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
        "steps_with_gpu_readings": "steps with GPU readings",
        "mean_gpu_utilization_percent": "mean GPU %",
        "largest_gpu_power_w": "largest W",
        "checkpoints": "checkpoints",
    }
    lines = [
        "# Runs of NeMo-RL's recipes",
        "",
        "Do NeMo-RL's recipes train with this package on one GPU or two, changed only where the machine and the time "
        f"limit require it? Of the {len(rows)} runs in the table {done} {'is' if done == 1 else 'are'} done.",
        "",
        table_line(["run", *names.values()]),
        table_line(["---"] * (1 + len(names))),
        *(table_line([row["case"], *(cell(row, name) for name in names)]) for row in rows),
        "",
        "## Overrides of each run",
        "",
        *(line for row in rows for line in override_lines(row)),
        "## How it was measured",
        "",
        "Each run is a process of its own, started with the script in `examples/` for its algorithm; its seconds "
        f"include its start-up. Models have random weights. A local folder has a tokenizer of {VOCABULARY} tokens and "
        "data with the columns of the recipes' datasets: 64 word problems written by hand for gsm8k "
        "(`benchmarks/word_problems`), text made from templates for all others. Memory is the largest reading of the "
        "driver's count. GPU readings come from `logger.monitor_gpus`, by way of metrics.jsonl: each step logs its "
        "mean utilisation and mean power; the table shows the mean utilisation over the steps and the largest power.",
        "",
        *origin_lines(rows),
        f"- [{data}]({data}) has each run with all of its overrides.",
        "",
        "## What it does not say",
        "",
        "Whether the models learn: with random weights they earn almost no reward, and batches and steps are few.",
    ]
    return "\n".join(textwrap.fill(line, 120) if is_prose(line) else line for line in lines) + "\n"


def origin_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields what each command measured, with machine and commit, for runs from several commands."""
    cases: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        origin = tuple(row[name] for name in ("machine", "commit", "date", "command"))
        cases.setdefault(origin, []).append(f"`{row['case']}`")
    for (machine, commit, date, command), names in cases.items():
        yield f"- {', '.join(names)}: {machine}; commit {commit}, {date}; `{command}`"


def is_prose(line: str) -> bool:
    """Returns whether a line may be wrapped."""
    return not line.startswith(("#", "|", "-", " "))


def cell(row: Mapping[str, Any], name: str) -> str:
    """Returns a row's value as text, `-` where it has none."""
    return "-" if row.get(name) is None else str(row[name])


def override_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields a run's recipe and its overrides, one on each line."""
    ending = "" if row["status"] == "done" else f" Its end: {row['status']}"
    yield f"`{row['case']}` runs `{row['recipe']}` with {row['sizes']}, for {row['named_model']}.{ending}"
    yield ""
    for override in shlex.split(row["overrides"]):
        first, *others = textwrap.wrap(override, 110, break_long_words=False, break_on_hyphens=False)
        yield f"    {first}"
        yield from (f"        {line}" for line in others)
    yield ""


def table_line(cells: Sequence[str]) -> str:
    """Formats one line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
