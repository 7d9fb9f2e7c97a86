"""Draws a run's learning curves from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_offload_rl.metrics.logger import METRICS_FILE, MetricRow, read_metrics

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
