"""Collects the rows of the result, and formats the printed tables and the page's table."""

import contextlib
import logging
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from result_file import write_result

from offload_ways import bars
from offload_ways.trips import Trip

logger = logging.getLogger(__name__)

Row = dict[str, Any]
WAY_FAILURES = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    subprocess.SubprocessError,
)
"""With any of these a way is left out of the table and the run goes on, since time on a GPU is scarce."""
BEGIN, END = "<!-- table: speed -->", "<!-- end -->"
RELEASES = 0.95
"""A way that gives back less of what left is not compared with."""


class Report:
    """Collects rows, and writes them whenever a case has ended.

    Args:
        path: of the JSON file; the page is beside it, as .md.
    """

    def __init__(self, path: Path) -> None:
        self.rows: list[Row] = []
        self._link: dict[str, list[float]] = {"d2h": [], "h2d": []}
        self._path = path

    @contextlib.contextmanager
    def attempt(self, case: str, way: str) -> Iterator[None]:
        """Runs a way; if it fails, adds a row with the reason."""
        try:
            yield
        except WAY_FAILURES as error:
            logger.warning("%s, %s: not run", case, way, exc_info=True)
            self.leave_out(case, way, f"{type(error).__name__}: {error}")

    def leave_out(self, case: str, way: str, why: str) -> None:
        """Records what was not measured."""
        self.rows.append({"case": case, "way": way, "not_run": why})

    def add_link(self, seconds_per_byte: dict[str, list[float]]) -> None:
        """Adds samples of the link's speed."""
        for direction, samples in seconds_per_byte.items():
            self._link[direction] += samples

    def add_trips(self, case: str, way: str, nbytes: int, trips: Sequence[Trip], has_driver: bool) -> None:
        """Adds medians of round trips, a row for each direction, and the memory released."""
        released = min(trip.released_bytes for trip in trips) / nbytes
        for direction, seconds in {
            "d2h": [trip.out_s for trip in trips],
            "h2d": [trip.back_s for trip in trips],
        }.items():
            median = statistics.median(seconds)
            row: Row = {
                "case": case,
                "way": way,
                "direction": direction,
                "gb_per_s": round(nbytes / median / 1e9, 3),
                "seconds": round(median, 5),
                "gb": round(nbytes / 1e9, 4),
                "rounds": len(seconds),
                "worst_gb_per_s": round(nbytes / max(seconds) / 1e9, 3),
            }
            self.rows.append(row | ({"released": round(released, 4)} if has_driver else {}))
        if has_driver:
            self.add("residue", way, f"{case}: rise of the driver's free memory over bytes that left", released)

    def add(self, case: str, way: str, metric: str, value: float | bool) -> None:
        """Adds a single figure, with its bar if it has one."""
        row: Row = {"case": case, "way": way, "metric": metric, "value": value}
        self.rows.append(row | bars.of_metric(case, way, metric))

    def finished(self) -> list[Row]:
        """Returns all rows, with the link's own first and each way's share of it."""
        link = {direction: 1 / statistics.median(samples) / 1e9 for direction, samples in self._link.items() if samples}
        rows: list[Row] = [
            {
                "case": "link",
                "way": "link",
                "direction": direction,
                "gb_per_s": round(rate, 3),
                "share_of_link": 1.0,
                "rounds": len(self._link[direction]),
            }
            for direction, rate in link.items()
        ]
        for row in self.rows:
            shared = dict(row)
            if row.get("direction") in link:
                shared["share_of_link"] = round(row["gb_per_s"] / link[row["direction"]], 4)
                shared |= bars.of_speed(row["case"], row["way"], row["direction"])
            rows.append(shared)
        return rows

    def write(self) -> None:
        """Writes the JSON file and the page's table so far; the page's prose is written by hand."""
        rows = self.finished()
        write_result(self._path, rows)
        page = self._path.with_suffix(".md")
        text = page.read_text(encoding="utf-8") if page.exists() else f"# {self._path.stem}\n\n{BEGIN}\n{END}\n"
        page.write_text(with_table(text, rows), encoding="utf-8")


def with_table(text: str, rows: Sequence[Row]) -> str:
    """Returns a page's text with its table replaced.

    Raises:
        ValueError: the page has no BEGIN with an END below it.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no {BEGIN} with {END} below it; its table stands between the two")
    return f"{before}{begin}\n\n{summary(rows)}\n\n{end}{after}"


def summary(rows: Sequence[Row]) -> str:
    """Formats one line for each case and direction, the number of bars met, and the bars missed."""
    head = "| case | direction | ours, GB/s | of the link | bar | fastest other way | its share of the link |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for ours, best in _compared(rows):
        lines.append(
            f"| {ours['case']} | {ours['direction']} | {ours['gb_per_s']:.2f} | {_percent(ours, 'share_of_link')} "
            f"| {_percent(ours, 'bar')} | `{best['way']}` | {_percent(best, 'share_of_link')} |"
        )
    barred = [row for row in rows if "bar" in row]
    missed = [f"- missed: {_against_bar(row)}" for row in barred if not _is_met(row)]
    not_run = [f"- not run: {row['case']}, {row['way']}" for row in rows if "not_run" in row]
    count = (
        f"{len(barred) - len(missed)} of the {len(barred)} bars of the result's rows are met{':' if missed else '.'}"
    )
    return "\n".join([*lines, "", count, *(["", *missed, *not_run] if missed or not_run else [])])


def markdown(rows: Sequence[Row]) -> list[str]:
    """Formats three tables: speeds, single figures, and what was not run."""
    speeds = [row for row in rows if "direction" in row]
    lines = ["| case | way | direction | GB/s | of the link | bar | released |", "|---|---|---|---|---|---|---|"]
    for row in speeds:
        cells = (row["case"], row["way"], row["direction"], f"{row['gb_per_s']:.2f}", _percent(row, "share_of_link"))
        lines.append(f"| {' | '.join(cells)} | {_percent(row, 'bar')} | {_percent(row, 'released')} |")
    figures = [row for row in rows if "metric" in row]
    if figures:
        lines += ["", "| case | way | figure | value | bar |", "|---|---|---|---|---|"]
    for row in figures:
        bar = f"{row['bar_is'].replace('_', ' ')} {row['bar']:g}" if "bar" in row else ""
        lines.append(f"| {row['case']} | {row['way']} | {row['metric']} | {float(row['value']):.6g} | {bar} |")
    missing = [row for row in rows if "not_run" in row]
    if missing:
        lines += ["", "Not run:", ""]
    lines += [f"- {row['case']}, {row['way']}: {' '.join(row['not_run'].split())}" for row in missing]
    return lines


def _percent(row: Row, key: str) -> str:
    return f"{row[key]:.2%}" if key in row else ""


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each bar, and one for each comparison with the fastest other way."""
    lines = [f"{'met' if _is_met(row) else 'MISSED'}: {_against_bar(row)}" for row in rows if "bar" in row]
    for ours, best in _compared(rows):
        ratio = ours["gb_per_s"] / best["gb_per_s"]
        lines.append(
            f"{ours['case']}, {ours['direction']}, ours is {ratio:.3f} times as fast as "
            f"{best['way']}, the fastest other way that really releases"
        )
    return lines


def _is_met(row: Row) -> bool:
    value = _value(row)
    return value >= row["bar"] if row["bar_is"] == "at_least" else value <= row["bar"]


def _against_bar(row: Row) -> str:
    what = f"{row['direction']}, share of the link" if "direction" in row else row["metric"]
    bar = f"{row['bar_is'].replace('_', ' ')} {row['bar']:g}"
    return f"{row['case']}, {row['way']}, {what}: {_value(row):.4f} ({bar})"


def _value(row: Row) -> float:
    return float(row["share_of_link"] if "direction" in row else row["value"])


def _compared(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Yields our speed for each case and direction beside that of the fastest other way that really releases."""
    pairs = []
    speeds = [row for row in rows if "share_of_link" in row and row["case"] != "link"]
    for case, direction in dict.fromkeys((row["case"], row["direction"]) for row in speeds):
        at = {row["way"]: row for row in speeds if (row["case"], row["direction"]) == (case, direction)}
        others = [
            row for way, row in at.items() if way != "ours" and ("released" not in row or row["released"] >= RELEASES)
        ]
        if "ours" in at and others:
            pairs.append((at["ours"], max(others, key=lambda row: float(row["gb_per_s"]))))
    return pairs
