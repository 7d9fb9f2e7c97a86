"""Computes what the processes do in one switch, as spans from the marks."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colocated_ways.marks import Mark
from colocated_ways.switches import Switch

TO_TRAINING, TO_GENERATION = "timeline to training", "timeline to generation"
ORIGINS: Mapping[str, str] = {TO_TRAINING: "the last token", TO_GENERATION: "the last optimizer kernel"}
"""What the moments of a timeline count from."""
_PROCESS_FILE = re.compile(r"(?P<process>[a-z]+)(-(?P<rank>\d+))?-\d+")


@dataclass(frozen=True)
class Span:
    """Describes something that a process did.

    Attributes:
        process: driver, policy or engine.
        name: what.
        start_ms: when it began, from the timeline's origin on; below 0 where it was under way by then.
        takes_ms: how long it took; None for a moment.
    """

    process: str
    name: str
    start_ms: float
    takes_ms: float | None

    @property
    def end_ms(self) -> float:
        """Returns when the span ended."""
        return self.start_ms + (self.takes_ms or 0.0)


def median_switch(found: Sequence[Switch]) -> Switch:
    """Returns the switch with the median total; of an even number, the shorter of the two in the middle."""
    return sorted(found, key=lambda one: one.both_s)[(len(found) - 1) // 2]


def timelines(marks: Sequence[Mark], switch: Switch) -> dict[str, list[Span]]:
    """Finds the spans of a switch, in the order of their beginnings, by direction."""
    return {
        TO_TRAINING: spans_between(marks, switch.last_token_s, switch.training_s),
        TO_GENERATION: spans_between(marks, switch.update_s, switch.prefill_s),
    }


def spans_between(marks: Sequence[Mark], start_s: float, end_s: float) -> list[Span]:
    """Finds what the driver, the first rank and the first engine did between two moments.

    Consecutive spans of one name in a process are merged, including the time between them; other spans of that name
    get a number.

    Args:
        marks: of all processes.
        start_s: the earlier moment, from which spans count.
        end_s: the later one.
    """
    runs: list[list[Mark]] = []
    names: dict[str, list[list[Mark]]] = {}
    of_window = [mark for mark in _of_first_processes(marks) if _start(mark) <= end_s and mark.at_s >= start_s]
    for mark in sorted(of_window, key=lambda mark: (_start(mark), -mark.seconds)):
        of_process = names.setdefault(_process(mark), [])
        if of_process and mark.seconds and _follows(mark, of_process[-1][-1]):
            of_process[-1].append(mark)
        else:
            of_process.append([mark])
            runs.append(of_process[-1])
    counts: dict[tuple[str, str], int] = {}
    return [_span(run, start_s, counts) for run in runs]


def table(spans: Sequence[Span]) -> list[str]:
    """Formats the spans as lines of a table, in milliseconds."""
    lines = [f"{'start':>9} {'end':>9} {'takes':>9}  what"]
    for span in spans:
        takes = "" if span.takes_ms is None else f"{span.takes_ms:.1f}"
        lines.append(f"{span.start_ms:9.1f} {span.end_ms:9.1f} {takes:>9}  {span.process}: {span.name}")
    return lines


def _of_first_processes(marks: Sequence[Mark]) -> list[Mark]:
    first: dict[str, str] = {}
    for mark in marks:
        first[_process(mark)] = min(mark.process, first.get(_process(mark), mark.process))
    return [mark for mark in marks if first[_process(mark)] == mark.process]


def _process(mark: Mark) -> str:
    match = _PROCESS_FILE.fullmatch(mark.process)
    return match["process"] if match else mark.process


def _start(mark: Mark) -> float:
    return mark.at_s - mark.seconds


def _follows(mark: Mark, earlier: Mark) -> bool:
    return mark.name == earlier.name and _start(mark) >= earlier.at_s


def _span(run: Sequence[Mark], start_s: float, counts: dict[tuple[str, str], int]) -> Span:
    process, name = _process(run[0]), run[0].name
    number = counts[process, name] = counts.get((process, name), 0) + 1
    name += f" ({number})" if number > 1 else ""
    name += f", {len(run)} times" if len(run) > 1 else ""
    takes_ms = 1e3 * (run[-1].at_s - _start(run[0]))
    return Span(process, name, 1e3 * (_start(run[0]) - start_s), takes_ms if run[0].seconds else None)
