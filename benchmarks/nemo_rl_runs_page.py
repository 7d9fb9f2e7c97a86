"""Writes the page of benchmarks/nemo_rl_runs.py: a table with a line a run, and the overrides of each."""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl_data import VOCABULARY


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
        "steps_with_gpu_readings": "steps with GPU readings",
        "mean_gpu_utilization_percent": "mean GPU %",
        "largest_gpu_power_w": "largest W",
        "checkpoints": "checkpoints",
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
        "start. Models have random weights. Data of the datasets' columns and a tokenizer of "
        f"{VOCABULARY} tokens lie in a local folder: gsm8k's are 64 word problems written by hand "
        "(`benchmarks/word_problems`), all others are made from templates. Memory is the largest reading of the "
        "driver's count. GPU readings are those of `logger.monitor_gpus`, from metrics.jsonl: a step has the means of "
        "utilisation and power, of which the table has the mean and the largest.",
        "",
        *origin_lines(rows),
        f"- [{data}]({data}) has each run with the whole of its overrides.",
        "",
        "## What it does not say",
        "",
        "Nothing of learning: a model with random weights earns next to no reward, and batches and steps are few.",
    ]
    return "\n".join(textwrap.fill(line, 120) if is_prose(line) else line for line in lines) + "\n"


def origin_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each command measured, and with what, for runs that come from several."""
    cases: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        origin = tuple(row[name] for name in ("machine", "commit", "date", "command"))
        cases.setdefault(origin, []).append(f"`{row['case']}`")
    for (machine, commit, date, command), names in cases.items():
        yield f"- {', '.join(names)}: {machine}; commit {commit}, {date}; `{command}`"


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
