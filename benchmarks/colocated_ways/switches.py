"""Computes the switch between trainer and generator from the marks of the processes."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from colocated_ways.marks import Mark


@dataclass(frozen=True)
class Switch:
    """Holds one cycle's moments, on the machine's clock.

    Attributes:
        last_token_s: the last token was generated.
        training_s: the first kernel of training began.
        update_s: the last kernel of the optimizer ended.
        prefill_s: the first kernel of the next prefill began.
    """

    last_token_s: float
    training_s: float
    update_s: float
    prefill_s: float

    @property
    def to_training_s(self) -> float:
        """Returns the time from the last generated token to the first kernel of training."""
        return self.training_s - self.last_token_s

    @property
    def to_generation_s(self) -> float:
        """Returns the time from the last kernel of the optimizer to the first of the next prefill."""
        return self.prefill_s - self.update_s

    @property
    def both_s(self) -> float:
        """Returns the sum of both ways."""
        return self.to_training_s + self.to_generation_s


def switches(marks: Sequence[Mark], start_s: float) -> list[Switch]:
    """Finds the whole cycles after a moment.

    Args:
        marks: of all processes, the earliest first.
        start_s: when the first cycle began.
    """
    names = ("first_prefill_kernel", "last_token", "first_training_kernel", "last_optimizer_kernel")
    # From the first prefill on: the update before it may have ended a little later than the driver knew.
    first_s = next((mark.at_s for mark in marks if mark.name == names[0] and mark.at_s > start_s), start_s)
    starts, tokens, trainings, updates = (_of_the_last(marks, name, first_s) for name in names)
    return [
        Switch(token, training, update, start)
        for token, training, update, start in zip(tokens, trainings, updates, starts[1:], strict=False)
    ]


def _of_the_last(marks: Sequence[Mark], name: str, first_s: float) -> list[float]:
    """Returns when each cycle reached a mark; with several ranks or engines, when the last one did."""
    by_process: dict[str, list[float]] = {}
    for mark in marks:
        if mark.name == name and mark.at_s >= first_s:
            by_process.setdefault(mark.process, []).append(mark.at_s)
    return [max(moments) for moments in zip(*by_process.values(), strict=False)]


def median_seconds(marks: Iterable[Mark], name: str, start_s: float = 0.0) -> float | None:
    """Returns the median of the spans of a name after a moment; None where there is none."""
    found = [mark.seconds for mark in marks if mark.name == name and mark.at_s > start_s]
    return statistics.median(found) if found else None


def names_of_spans(marks: Iterable[Mark], beginning: str) -> list[str]:
    """Returns the names of marks that begin with a prefix, each once."""
    return list(dict.fromkeys(mark.name for mark in marks if mark.name.startswith(beginning)))
