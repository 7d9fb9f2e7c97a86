"""Records when the copies of each target between GPU and host began and ended."""

from typing import Any

from colocated_ways.marks import Marks, StreamMoments
from nemo_offload_rl.residency.metrics import Meter, Started


class CopyMarks:
    """Records a span `copy TARGET to PLACEMENT` for each move of a policy's state that copies.

    Args:
        meter: is told of each move.
        marks: get the spans.
        moments: know the GPU's clock.
    """

    def __init__(self, meter: Meter, marks: Marks, moments: StreamMoments) -> None:
        self._marks = marks
        self._moments = moments
        self._moves: list[Started] = []
        self._tell_meter = meter.record_start
        setattr(meter, "record_start", self._record_start)  # noqa: B010 - mypy takes no method for an attribute

    def _record_start(self, started: Started) -> None:
        self._moves.append(started)
        self._tell_meter(started)

    def resolve(self) -> None:
        """Writes down the copies that have been queued; waits for them."""
        waiting = [started for started in self._moves if not started.move.is_queued]
        for started in self._moves:
            if started.move.is_queued and not started.move.has_failed:
                self._note(started)
        self._moves = waiting

    def _note(self, started: Started) -> None:
        helper = getattr(started.move, "_helper", None)  # moves of a streamed optimizer have none
        span = None if helper is None else helper.result()
        if span is None or not started.move.nbytes:
            return
        span.end.wait()
        begin_s, end_s = self._at_s(span.begin), self._at_s(span.end)
        if begin_s is not None and end_s is not None:
            self._marks.note(f"copy {started.target} to {started.goal}", end_s, end_s - begin_s)

    def _at_s(self, event: Any) -> float | None:
        """Returns when an event of `memory.streams` was reached; on a CPU the event holds the time itself."""
        return event._time if hasattr(event, "_time") else self._moments.at_s(event._event)
