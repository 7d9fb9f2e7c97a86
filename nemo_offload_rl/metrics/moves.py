"""Summarises a run's moves between GPU and host, from its metrics `residency/PHASE/TARGET/QUANTITY`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

MOVES_PREFIX = "residency/"

Moves = dict[tuple[str, str], dict[str, float]]
"""(phase, target) -> quantity -> value."""

# A streamed step's copies, and the reference weights' swap, go both ways.
_TWO_WAY_PHASES = ("train", "logprob")

_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "gb": ("GB", "{:.3f}".format),
    "copy_s": ("copy s", "{:.4f}".format),
    "gb_per_s": ("GB/s", "{:.1f}".format),
    "share_of_link": ("of the link", "{:.0%}".format),
    "exposed_s": ("exposed s", "{:.4f}".format),
    "hidden_s": ("hidden s", "{:.4f}".format),
}


def median_moves(rows: Sequence[Mapping[str, float | None]]) -> Moves:
    """Returns the median of each quantity of each move over the steps that made it, in the order of first appearance.

    Args:
        rows: The steps' metrics, as `read_metrics` gives them.
    """
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            parts = name.removeprefix(MOVES_PREFIX).split("/")
            if name.startswith(MOVES_PREFIX) and len(parts) == 3 and value is not None:
                phase, target, quantity = parts
                values.setdefault((phase, target), {}).setdefault(quantity, []).append(value)
    return {
        move: {quantity: statistics.median(of_steps) for quantity, of_steps in quantities.items()}
        for move, quantities in values.items()
    }


def measured_link_bytes_per_s(rows: Sequence[Mapping[str, float | None]]) -> float | None:
    """Returns the link speed in one direction that a run's worker measured at its start; the slower direction's.

    It is computed from moves in one direction: their speed divided by their share of the link's speed.

    Args:
        rows: The steps' metrics, as `read_metrics` gives them.

    Returns:
        Bytes a second; None if no move copied between a GPU and page-locked memory in one direction.
    """
    speeds = [
        medians["gb_per_s"] * 1e9 / medians["share_of_link"]
        for (phase, _), medians in median_moves(rows).items()
        if phase not in _TWO_WAY_PHASES and medians.get("share_of_link", 0) > 0
    ]
    return min(speeds, default=None)


def moves_table(rows: Sequence[Mapping[str, float | None]]) -> Table | None:
    """Makes a table of the copies over the link, with a row for each phase and each target copied for it.

    Memory that was dropped or zeroed was not copied and has no row.

    Args:
        rows: The steps' metrics, as `read_metrics` gives them.

    Returns:
        Medians over the steps; None where nothing was copied.
    """
    copied = {move: medians for move, medians in median_moves(rows).items() if "gb" in medians}
    if not copied:
        return None
    measured = [quantity for quantity in _COLUMNS if any(quantity in medians for medians in copied.values())]
    table = Table(title="Copies between GPU and host in a step, medians", title_justify="left")
    table.add_column("for phase")
    table.add_column("moved")
    for quantity in measured:
        table.add_column(_COLUMNS[quantity][0], justify="right")
    phases = list(dict.fromkeys(phase for phase, _ in copied))
    for (phase, target), medians in sorted(copied.items(), key=lambda item: phases.index(item[0][0])):
        cells = [_COLUMNS[quantity][1](medians[quantity]) if quantity in medians else "" for quantity in measured]
        table.add_row(phase, target.replace("_", " "), *cells)
    return table
