"""Reduces metrics: over ranks to the worst value, as a step is as slow as its slowest rank; over steps to the mean."""

from collections.abc import Iterable, Mapping, Sequence

_SMALLEST_IS_WORST = ("hidden_s", "gb_per_s", "share_of_link")
"""Last parts of names of metrics whose smallest value is the worst: speeds, and waiting time that was saved."""
_FREE_MEMORY = "gpu_free_"


def worst_of_ranks(every_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the worst rank's value of each quantity that any rank measured.

    The worst value is the largest of seconds, bytes and memory in use, and the smallest of hidden seconds, speeds and
    free GPU memory. Two metrics of one move may therefore come from two ranks.

    Args:
        every_rank: what `Meter.take_metrics` gives on each rank; a quantity may be missing where nothing moved.
    """
    values: dict[str, list[float]] = {}
    for rank in every_rank:
        for name, value in rank.items():
            values.setdefault(name, []).append(value)
    return {name: min(of_ranks) if _smallest_is_worst(name) else max(of_ranks) for name, of_ranks in values.items()}


def moves_and_records[Record](
    every_rank: Sequence[tuple[Mapping[str, float], list[Record]]],
) -> tuple[dict[str, float], list[Record]]:
    """Returns `worst_of_ranks` of the metrics, and the log records of all ranks, given pairs of the two."""
    records = [record for _, of_rank in every_rank for record in of_rank]
    return worst_of_ranks([metrics for metrics, _ in every_rank]), records


def _smallest_is_worst(name: str) -> bool:
    quantity = name.rpartition("/")[2]
    return quantity in _SMALLEST_IS_WORST or quantity.startswith(_FREE_MEMORY)


def mean(values: Iterable[float]) -> float:
    """Returns the mean of at least one number."""
    held = list(values)
    return sum(held) / len(held)
