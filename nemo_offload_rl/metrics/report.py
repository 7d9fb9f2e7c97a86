"""Shows the user a run's live progress, and tables of its phases and of its peak memory at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nemo_offload_rl.metrics.phases import STEP_SECONDS, TFLOPS_PREFIX, UTILIZATION_PREFIX, mean_in_phase, phase_seconds
from nemo_offload_rl.metrics.plot import plot_training
from nemo_offload_rl.metrics.samples import as_plain_text

__all__ = ["LiveProgress", "phase_seconds", "phase_table", "plot_training"]


@dataclass(frozen=True)
class Headline:
    """Names a metric that the line of progress shows, with its label and number format."""

    label: str
    metric: str
    number_format: str


HEADLINES = (
    Headline("reward", "train/reward", ".3f"),
    Headline("loss", "train/loss", ".4f"),
    Headline("accuracy", "validation/accuracy", ".3f"),
    Headline("margin", "train/rewards_margin_mean", ".3f"),
    Headline("p(answer)", "validation/answer_probability", ".3f"),
    Headline("KL", "train/kl_penalty", ".2e"),
    Headline("tokens/s", "performance/tokens_per_sec", ",.0f"),
    Headline("MFU", f"{UTILIZATION_PREFIX}training", ".1%"),
)


class LiveProgress:
    """Shows the newest step of a run: in a live panel on a terminal, otherwise one line per step.

    Use it as a context manager around the steps. It shows a headline's last value until the next measurement
    (validation does not happen at every step), and leaves out headlines that were never measured.

    Args:
        title: The run's name, a word or two.
        num_steps: The most steps of the run.
        console: Where to print; None for the standard output.
    """

    def __init__(self, title: str, num_steps: int, console: Console | None = None) -> None:
        self._title = title
        self._num_steps = num_steps
        self._console = console if console is not None else Console()
        self._latest: dict[str, float] = {}
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(title, total=num_steps)
        self._live = Live(self._bar, console=self._console, refresh_per_second=4) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows `step` (1 to num_steps; 0 for before the first) with its metrics, named as in metrics.jsonl."""
        self._latest |= {line.metric: metrics[line.metric] for line in HEADLINES if line.metric in metrics}
        values = [(line.label, format(self._latest[line.metric], line.number_format)) for line in HEADLINES
                  if line.metric in self._latest]  # fmt: skip
        phases = phase_seconds(metrics)
        total = phases.pop(STEP_SECONDS, sum(phases.values()))
        if self._live is None:
            self._console.print(self._line(step, values, phases, total), soft_wrap=True, highlight=False)
            return
        self._bar.update(self._task, completed=step)
        self._live.update(Group(self._bar, _values_line(values), _phases_line(phases, total)))

    def _line(self, step: int, values: Sequence[tuple[str, str]], phases: Mapping[str, float], total: float) -> str:
        parts = [f"{self._title} {step}/{self._num_steps}", *(f"{label} {value}" for label, value in values)]
        if phases:
            parts.append(f"{total:.2f} s ({', '.join(f'{name} {seconds:.2f}' for name, seconds in phases.items())})")
        return "  ".join(parts)


def phase_table(rows: Sequence[Mapping[str, float | None]]) -> Table:
    """Makes a table of the phases of a run's steps: calls, total and mean seconds, share of the steps' time.

    Phases whose FLOPs are known also have TFLOP/s a GPU and, where its peak is known, the share of that.

    Args:
        rows: The steps' metrics, as `read_metrics` gives them. Where they have `timing/train/total_step_time`, the time
            of steps outside their phases is a row of its own; a step without it (a validation before the first step)
            counts with the time of its phases.
    """
    calls: dict[str, int] = {}
    totals: dict[str, float] = {}
    num_steps, whole = 0, 0.0
    for row in rows:
        phases = phase_seconds(row)
        in_phases = sum(phases.values()) - phases.get(STEP_SECONDS, 0.0)
        num_steps += STEP_SECONDS in phases
        whole += phases.pop(STEP_SECONDS, in_phases)
        for phase, seconds in phases.items():
            calls[phase] = calls.get(phase, 0) + 1
            totals[phase] = totals.get(phase, 0.0) + seconds

    table = Table(title="Where the time went", title_justify="left")
    table.add_column("phase")
    for column in ("calls", "total s", "mean s", "share"):
        table.add_column(column, justify="right")
    measured = [column for column in _COMPUTE_COLUMNS if any(mean_in_phase(rows, column[1], name) for name in totals)]
    for title, _, _ in measured:
        table.add_column(title, justify="right")
    for phase, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        means = [(mean_in_phase(rows, prefix, phase), number_format) for _, prefix, number_format in measured]
        cells = ["" if mean is None else format(mean, number_format) for mean, number_format in means]
        _add_phase_row(table, phase, calls[phase], seconds, whole, *cells)
    if num_steps:
        _add_phase_row(table, "outside the phases", num_steps, whole - sum(totals.values()), whole)
        table.add_section()
        table.add_row("whole run", "", f"{whole:.2f}", "", "100.0%")
    return table


# Title, prefix of the metric's name, number format. A tiny model on a CPU reaches fractions of a TFLOP/s.
_COMPUTE_COLUMNS = (("TFLOP/s a GPU", TFLOPS_PREFIX, ".4g"), ("of peak", UTILIZATION_PREFIX, ".1%"))


def _add_phase_row(table: Table, phase: str, calls: int, seconds: float, whole: float, *cells: str) -> None:
    share = f"{seconds / whole:.1%}" if whole > 0 else ""
    table.add_row(phase, str(calls), f"{seconds:.2f}", f"{seconds / calls:.3f}", share, *cells)


def _values_line(values: Sequence[tuple[str, str]]) -> Text:
    return Text("   ").join(Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in values)


def _phases_line(phases: Mapping[str, float], total: float) -> Text:
    parts = [f"{name} {seconds:.2f}" for name, seconds in phases.items()]
    return Text(f"{total:.2f} s a step: {', '.join(parts)}" if parts else "", style="dim")


logger = logging.getLogger(__name__)

_POLICY, _GENERATION = "performance/memory/policy/", "performance/memory/generation/"
# Verb of the policy, or other quantity -> its row's title.
_VERBS = {"train": "training", "logprobs": "log-prob passes", "refit": "refit"}
_OTHERS = {
    f"{_GENERATION}gpu_peak_allocated_gib": "GPU: generation, by torch",
    f"{_POLICY}host_rss_gib": "host: a process of the policy",
    f"{_GENERATION}host_rss_gib": "host: a process of generation",
}


def memory_table(rows: Sequence[Mapping[str, float | None]], planned_gib: Mapping[str, float]) -> Table | None:
    """Makes a table of the largest memory that a rank, or an engine, has taken in each phase, beside the planned.

    Args:
        rows: The steps' metrics, as `read_metrics` gives them.
        planned_gib: The planned peak of each verb of the policy, as far as it is known.

    Returns:
        GiB of the policy's phases, if it has GPUs, then of generation and of the host; None where nothing was measured.
    """
    peaks = _policy_peaks(rows)
    others = {title: gib for name, title in _OTHERS.items() if (gib := _largest(rows, name)) is not None}
    if not peaks and not others:
        return None
    table = Table(title="Peak memory, GiB of the fullest process", title_justify="left")
    table.add_column("phase")
    for title in ("measured", "planned") if planned_gib and peaks else ("measured",):
        table.add_column(title, justify="right")
    for verb, gib in peaks.items():
        planned = [f"{planned_gib[verb]:.2f}"] if verb in planned_gib else []
        table.add_row(f"GPU: {_VERBS[verb]}", f"{gib:.2f}", *planned)
    for title, gib in others.items():
        table.add_row(title, f"{gib:.2f}")
    return table


def log_peaks(rows: Sequence[Mapping[str, float | None]], planned_gib: Mapping[str, float]) -> None:
    """Logs the memory of a run with GPUs, and warns if a phase has taken more GPU memory than was planned."""
    peaks = _policy_peaks(rows)
    table = memory_table(rows, planned_gib)
    if not peaks or table is None:
        return
    logger.info("%s", as_plain_text(table))
    above = [
        f"{_VERBS[verb]} {gib:.2f} GiB, {gib - planned_gib[verb]:.2f} more than planned"
        for verb, gib in peaks.items()
        if verb in planned_gib and gib > planned_gib[verb]
    ]
    if above:
        logger.warning(
            "The policy took more GPU memory than the plan gave it: %s; what the plan decided for this GPU has that "
            "much less room than it assumed: if memory runs out, take smaller micro-batches or packed rows.",
            "; ".join(above),
        )


def _policy_peaks(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    found = {verb: _largest(rows, f"{_POLICY}gpu_peak_{verb}_gib") for verb in _VERBS}
    return {verb: gib for verb, gib in found.items() if gib is not None}


def _largest(rows: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    return max((value for row in rows if (value := row.get(name)) is not None), default=None)
