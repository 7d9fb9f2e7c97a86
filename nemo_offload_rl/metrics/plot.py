"""Draws from metrics.jsonl: a run's learning curves, and one step's phases, copies and GPU memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nemo_offload_rl.metrics.logger import METRICS_FILE, MetricRow, read_metrics
from nemo_offload_rl.metrics.moves import median_moves
from nemo_offload_rl.metrics.phases import STEP_SECONDS, TFLOPS_PREFIX, UTILIZATION_PREFIX, phase_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


INK = "#333333"
SMOOTHING_STEPS = 10


@dataclass(frozen=True)
class Panel:
    """Describes the plot of one metric; one measured at every step is smoothed and drawn over its raw values."""

    metric: str
    title: str
    colour: str
    every_step: bool


LOSS = Panel("train/loss", "Training loss", "#0072B2", every_step=True)
REWARD = Panel("train/reward", "Training reward", "#0072B2", every_step=True)
MARGIN = Panel("train/rewards_margin_mean", "Margin of chosen over rejected", "#0072B2", every_step=True)
PREFERENCE_ACCURACY = Panel("train/accuracy", "Training accuracy", "#0072B2", every_step=True)
ANSWER_PROBABILITY = Panel(
    "validation/answer_probability", "Probability of the right answer", "#C0461B", every_step=False
)
ACCURACY = Panel("validation/accuracy", "Validation accuracy", "#C0461B", every_step=False)
AGE = Panel("train/avg_trajectory_age", "Age of the answers, updates", "#7A4FA3", every_step=True)
PANELS = (LOSS, REWARD, MARGIN, PREFERENCE_ACCURACY, AGE, ANSWER_PROBABILITY, ACCURACY)


def plot_training(run_dir: Path, name: str) -> Path:
    """Draws a run's curves over its steps to `run_dir/NAME.png`.

    It draws the reward, or the loss of a run without rewards; for preference runs also margin and accuracy; and the
    validation metrics.

    Args:
        run_dir: A run's folder, with its metrics.jsonl.
        name: The picture's name without its ending: the algorithm's name.

    Raises:
        ValueError: The run has no metrics yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(Path(run_dir) / METRICS_FILE)
    panels = _panels_of(rows)
    if not panels:
        raise ValueError(
            f"{Path(run_dir) / METRICS_FILE} has no loss, reward or validation to draw: run at least one step"
        )
    figure = Figure(figsize=(5.2 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, panel_axes in zip(panels, axes, strict=True):
        _draw_panel(panel_axes, panel, rows)
    path = Path(run_dir) / f"{name}.png"
    figure.savefig(path, dpi=150)
    return path


def smoothed(values: Sequence[float], num_steps: int = SMOOTHING_STEPS) -> list[float]:
    """Returns the mean of each value and up to num_steps - 1 before it."""
    windows = (values[max(0, end - num_steps) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _panels_of(rows: Sequence[MetricRow]) -> list[Panel]:
    measured = [panel for panel in PANELS if _points(rows, panel.metric)]
    return [panel for panel in measured if panel is not LOSS or REWARD not in measured]


def _points(rows: Sequence[MetricRow], metric: str) -> list[tuple[float, float]]:
    return [
        (step, value) for row in rows if (step := row["step"]) is not None and (value := row.get(metric)) is not None
    ]


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[MetricRow]) -> None:
    points = _points(rows, panel.metric)
    steps = [step for step, _ in points]
    values = [value for _, value in points]
    if panel.every_step:
        shown = smoothed(values)
        axes.plot(steps, values, color=panel.colour, alpha=0.25, linewidth=1)
        axes.plot(steps, shown, color=panel.colour, linewidth=2)
    else:
        shown = values
        axes.plot(steps, values, color=panel.colour, linewidth=2, marker="o", markersize=4)
    axes.annotate(
        f"{shown[-1]:.3g}",
        (steps[-1], shown[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=panel.colour,
        fontweight="bold",
        annotation_clip=False,
    )
    if all(0 <= value <= 1 for value in values) and panel is not LOSS:
        axes.set_ylim(-0.02, 1.02)
    axes.set_title(panel.title, loc="left", pad=10, color=INK, fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=INK)
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")


TIMELINE_FILE = "step_timeline.png"
OUTSIDE = "outside the phases"
PHASE_COLOUR, OUTSIDE_COLOUR, COPY_COLOUR, MEMORY_COLOUR = "#0072B2", "#bbbbbb", "#C0461B", "#2A8A5C"
ROLLOUT_COLOUR = "#7A4FA3"
_ROLLOUTS = "timing/rollouts/"

# The loop phase in which each residency phase is entered: at the loop phase's beginning or, for generate, at its end.
_ENTERED_IN = {"refit": ("refit",), "generate": ("refit",), "logprob": ("logprobs", "reference_logprobs"),
               "train": ("training",)}  # fmt: skip
# Metric with the peak GPU memory of a phase's last call, named after the worker's method.
_PEAKS = {
    "refit": "performance/memory/policy/gpu_peak_refit_gib",
    "sampling": "performance/memory/generation/gpu_peak_allocated_gib",
    "logprobs": "performance/memory/policy/gpu_peak_logprobs_gib",
    "reference_logprobs": "performance/memory/policy/gpu_peak_logprobs_gib",
    "training": "performance/memory/policy/gpu_peak_train_gib",
}


@dataclass(frozen=True)
class Bar:
    """Describes a bar of the timeline, in seconds from the step's beginning, with its label and note."""

    label: str
    start_s: float
    seconds: float
    note: str

    @property
    def end_s(self) -> float:
        """The bar's end in seconds."""
        return self.start_s + self.seconds


def typical_step(rows: Sequence[MetricRow]) -> MetricRow | None:
    """Returns the step with the median time, without the first step if there are others; None without a whole step."""
    seconds = {id(row): whole for row in rows if (whole := phase_seconds(row).get(STEP_SECONDS)) is not None}
    steps = [row for row in rows if id(row) in seconds]
    later = sorted(steps[1:] or steps, key=lambda row: seconds[id(row)])
    return later[(len(later) - 1) // 2] if later else None


def phase_bars(row: MetricRow) -> list[Bar]:
    """Returns a step's phases one after the other, in the order in which they first ended; then the time outside them.

    A phase that is entered several times, such as `sampling` with dynamic sampling, is one bar.
    """
    phases = phase_seconds(row)
    whole = phases.pop(STEP_SECONDS, sum(phases.values()))
    bars, now = [], 0.0
    for phase, seconds in phases.items():
        bars.append(Bar(phase.replace("_", " "), now, seconds, _phase_note(row, phase, seconds, whole)))
        now += seconds
    if whole > now:
        bars.append(Bar(OUTSIDE, now, whole - now, _seconds(whole - now, whole)))
    return bars


def copy_bars(row: MetricRow) -> list[Bar]:
    """Returns the copies between GPU and host, each starting where its residency phase was entered.

    Metrics have a copy's duration, but not its start: a copy that began early, or waited, is drawn at the wrong time.
    """
    of_phase = {bar.label: bar for bar in phase_bars(row)}
    bars = []
    for (phase, target), move in median_moves([row]).items():
        entered = [name.replace("_", " ") for name in _ENTERED_IN.get(phase, ())]
        inside = next((of_phase[name] for name in entered if name in of_phase), None)
        if inside is None or "gb" not in move:
            continue
        start = inside.start_s
        if phase == "generate":
            start = max(start, inside.end_s - move["copy_s"])
        note = f"{_size(move['gb'])} in {_duration(move['copy_s'])}, {_duration(move['exposed_s'])} waited"
        bars.append(Bar(f"{target.replace('_', ' ')}, for {phase}", start, move["copy_s"], note))
    return bars


def rollout_bars(row: MetricRow) -> list[Bar]:
    """Returns how the step's rollouts were sampled ahead, from when sampling began to wait; empty if they were not."""
    seconds = {name.removeprefix(_ROLLOUTS): row[name] for name in row if name.startswith(_ROLLOUTS)}
    whole = sum(value for value in seconds.values() if value is not None)
    bars, now = [], 0.0
    for label, value in seconds.items():
        if value is not None:
            bars.append(Bar(label, now, value, _seconds(value, whole)))
            now += value
    return bars


def memory_bars(row: MetricRow) -> list[tuple[Bar, float]]:
    """Returns the phases whose GPU peak was measured, each with the GiB of the fullest rank; empty without a GPU."""
    bars = []
    for bar in phase_bars(row):
        name = _PEAKS.get(bar.label.replace(" ", "_"))
        peak = None if name is None else row.get(name)
        if peak is not None:
            bars.append((bar, peak))
    return bars


def plot_step(run_dir: Path) -> Path:
    """Draws the typical step of a run to `run_dir/step_timeline.png`.

    Args:
        run_dir: A run's folder, with its metrics.jsonl.

    Raises:
        ValueError: The run has no whole step yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(Path(run_dir) / METRICS_FILE)
    row = typical_step(rows)
    if row is None:
        raise ValueError(f"{Path(run_dir) / METRICS_FILE} has no whole step to draw: run at least one step")
    phases, copies, memory = phase_bars(row), copy_bars(row), memory_bars(row)
    rollouts = rollout_bars(row)
    parts: Mapping[str, int] = {
        "phases": len(phases),
        "rollouts": len(rollouts),
        "copies": len(copies),
        "memory": 5 if memory else 0,
    }
    shown = {name: size for name, size in parts.items() if size}
    figure = Figure(figsize=(10, 0.9 + sum(0.3 * size + 0.7 for size in shown.values())), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        len(shown), 1, sharex=True, squeeze=False, height_ratios=[0.3 * size + 0.4 for size in shown.values()]
    )[:, 0]
    axes = dict(zip(shown, panels, strict=True))
    whole = max(bar.end_s for bar in (*phases, *rollouts))
    _draw_bars(axes["phases"], phases, whole, PHASE_COLOUR, f"Step {row['step']:.0f}: {_duration(phases[-1].end_s)}")
    if rollouts:
        title = "Its rollouts, sampled while earlier steps trained"
        _draw_bars(axes["rollouts"], rollouts, whole, ROLLOUT_COLOUR, title)
    if copies:
        title = "Copies between GPU and host, each drawn from where its phase is entered"
        _draw_bars(axes["copies"], copies, whole, COPY_COLOUR, title)
    if memory:
        _draw_memory(axes["memory"], memory)
    panels[-1].set_xlabel("seconds from the step's beginning", color=INK)
    panels[-1].set_xlim(0, whole)
    path = Path(run_dir) / TIMELINE_FILE
    figure.savefig(path, dpi=150)
    return path


def _draw_bars(axes: Axes, bars: Sequence[Bar], whole: float, colour: str, title: str) -> None:
    for place, bar in enumerate(bars):
        # A bar that is too short to be seen gets a minimum width.
        axes.barh(
            place,
            max(bar.seconds, whole / 500),
            left=bar.start_s,
            height=0.62,
            color=OUTSIDE_COLOUR if bar.label == OUTSIDE else colour,
        )
        at_s, shift, alignment, ink = _note_place(bar, whole)
        axes.annotate(
            bar.note,
            (at_s, place),
            xytext=(shift, 0),
            textcoords="offset points",
            ha=alignment,
            va="center",
            fontsize=8.5,
            color=ink,
        )
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    _style(axes, title)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)


def _note_place(bar: Bar, whole: float) -> tuple[float, int, Literal["left", "right"], str]:
    """Returns the position of a bar's note in seconds, its offset in points, its alignment and its colour."""
    before, behind = bar.start_s, whole - bar.end_s
    if max(before, behind) < 0.4 * whole:
        return bar.start_s, 5, "left", "white"
    return (bar.end_s, 5, "left", INK) if behind >= before else (bar.start_s, -5, "right", INK)


def _draw_memory(axes: Axes, memory: Sequence[tuple[Bar, float]]) -> None:
    largest = max(gib for _, gib in memory)
    for bar, gib in memory:
        axes.bar(bar.start_s, gib, width=bar.seconds, align="edge", color=MEMORY_COLOUR, alpha=0.75)
        axes.annotate(
            f"{gib:.1f}",
            (bar.start_s + bar.seconds / 2, gib),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color=INK,
        )
    axes.set_ylim(0, 1.2 * largest)
    _style(axes, "Peak of GPU memory in each phase, GiB of the fullest rank, or engine in sampling")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", pad=8, color=INK, fontsize=11, fontweight="bold")
    axes.tick_params(colors=INK, length=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")


def _phase_note(row: MetricRow, phase: str, seconds: float, whole: float) -> str:
    note = _seconds(seconds, whole)
    if (tflops := row.get(f"{TFLOPS_PREFIX}{phase}")) is not None:
        note += f", {tflops:.3g} TFLOP/s a GPU"
    if (share := row.get(f"{UTILIZATION_PREFIX}{phase}")) is not None:
        note += f" ({share:.0%} of its peak)"
    return note


def _seconds(seconds: float, whole: float) -> str:
    return f"{_duration(seconds)} ({seconds / whole:.0%})" if whole > 0 else _duration(seconds)


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 or seconds == 0 else f"{seconds * 1e3:.2f} ms"


def _size(gigabytes: float) -> str:
    return f"{gigabytes:.2f} GB" if gigabytes >= 1 else f"{gigabytes * 1e3:.3g} MB"
