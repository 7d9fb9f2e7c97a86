"""Draws memory over a training step from a file that memory_curve.py has written."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.metrics.plot import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = dict[str, list[dict[str, Any]]]
"""Rows of each way, in the order of time."""
COLOURS = {"plain": "#0072B2", "offloaded": "#C0461B"}
_STRENGTHS = {"forward": 0.18, "backward": 0.42, "optimizer": 0.8}
_GIB_IN_MIB = 1024


class CurveError(ValueError):
    """Reports a file that no picture can be drawn from."""


def draw(result: Path, picture: Path) -> None:
    """Draws a file of points: memory over time, and below it what each step was doing.

    Args:
        result: written by `--tables memory`.
        picture: the PNG, 1,200 pixels wide.

    Raises:
        CurveError: the file is not there, or has no points.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not result.is_file():
        raise CurveError(f"{result} is no file; --tables memory writes one")
    ways = by_way([row for row in json.loads(result.read_text())["rows"] if "way" in row and "ms" in row])
    if set(ways) != set(COLOURS):
        raise CurveError(
            f"{result} has points of {', '.join(ways) or 'no step'}, not of {' and '.join(COLOURS)}; give a file that "
            "--tables memory wrote"
        )
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[6, 1])
    _draw_curves(above, ways)
    _draw_passes(below, ways)
    for axes in (above, below):
        axes.tick_params(colors=INK, length=0)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)


def by_way(rows: Sequence[Mapping[str, Any]]) -> Points:
    """Returns the rows of each way."""
    ways: Points = {}
    for row in rows:
        ways.setdefault(str(row["way"]), []).append(dict(row))
    return ways


def _draw_curves(axes: "Axes", ways: Points) -> None:
    end = max(points[-1]["ms"] for points in ways.values())
    levels = {way: [point["peak_mib"] / _GIB_IN_MIB for point in points[1:]] for way, points in ways.items()}
    highest = max(map(max, levels.values()))
    for way, points in ways.items():
        edges, colour = [point["ms"] for point in points], COLOURS[way]
        axes.stairs(levels[way], edges, color=colour, linewidth=1.8, baseline=None)
        top = max(levels[way])
        since = edges[levels[way].index(top)]
        axes.plot([since, end], [top, top], color=colour, linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(
            f"{way}\n{top:.1f} GiB",
            (end, top),
            xytext=(6, 0),
            textcoords="offset points",
            va="bottom" if top == highest else "top",  # keeps the two labels apart
            color=colour,
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.05 * highest)
    axes.set_title("GPU memory in one training step", loc="left", pad=10, color=INK, fontsize=11, fontweight="bold")
    axes.set_ylabel("allocated by torch, GiB\n(the most within each layer)", color=INK)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_passes(axes: "Axes", ways: Points) -> None:
    text: Any = {"va": "center", "fontsize": 9, "color": INK}
    for height, (way, points) in enumerate(reversed(ways.items())):
        for doing, number, begin, end in passes(points):
            axes.barh(height, end - begin, 0.8, begin, color=COLOURS[way], alpha=_STRENGTHS[doing], linewidth=0)
            if number is None:  # too short for its name
                axes.annotate(doing, (end, height), (6, 0), textcoords="offset points", annotation_clip=False, **text)
            else:
                axes.text((begin + end) / 2, height, f"{doing} {number}", ha="center", **text)
    axes.set_yticks(range(len(ways)), reversed(ways))
    axes.set_xlabel("ms since the step began", color=INK)


def passes(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, int | None, float, float]]:
    """Returns what a step was doing: (doing, number, begin, end), in ms, without gaps."""
    found: list[tuple[str, int | None, float, float]] = []
    for before, point in itertools.pairwise(points):
        doing, number = point["doing"], point["number"]
        if found and found[-1][:2] == (doing, number):
            found[-1] = (doing, number, found[-1][2], point["ms"])
        else:
            found.append((doing, number, before["ms"], point["ms"]))
    return found
