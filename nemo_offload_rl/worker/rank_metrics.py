"""Reduces many numbers to one: of ranks the worst, as a step is as slow as its slowest rank; of steps the mean."""

from collections.abc import Iterable, Mapping, Sequence

_LEAST_COUNTS = ("hidden_s", "gb_per_s", "share_of_link")
"""Endings of names of which the smallest value is the worst: speed, and waiting that was saved."""
_FREE_MEMORY = "gpu_free_"


def worst_of_ranks(every_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the worst rank's value of each quantity that any rank measured.

    Seconds, bytes and memory in use count at their largest; hidden seconds, speeds and free GPU memory at their
    smallest. Two values of one move may therefore be those of two ranks.

    Args:
        every_rank: what `Meter.take_metrics` gives on each rank; a quantity may be missing where nothing moved.
    """
    values: dict[str, list[float]] = {}
    for rank in every_rank:
        for name, value in rank.items():
            values.setdefault(name, []).append(value)
    return {name: min(of_ranks) if _least_counts(name) else max(of_ranks) for name, of_ranks in values.items()}


def _least_counts(name: str) -> bool:
    quantity = name.rpartition("/")[2]
    return quantity in _LEAST_COUNTS or quantity.startswith(_FREE_MEMORY)


def mean(values: Iterable[float]) -> float:
    """Returns the mean of some numbers, of which there is at least one."""
    held = list(values)
    return sum(held) / len(held)
