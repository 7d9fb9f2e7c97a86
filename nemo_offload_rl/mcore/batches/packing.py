"""Packs sequences into rows of a fixed number of tokens, in as few rows as a fast heuristic finds."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence


def modified_first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items by modified first-fit decreasing (Johnson and Garey 1985, "A 71/60 theorem for bin packing").

    Items above half of the capacity get a bin each. Each of these bins gets the largest item above a third that fits;
    then, from the last bin to the first, those without such an item get a pair of items above a sixth; then each gets
    whatever fits, the largest first. The remaining items are packed first-fit decreasing.

    Args:
        sizes: sizes of the items; one above the capacity gets a bin of its own.
        capacity: capacity of each bin.

    Returns:
        Indices of items, bin by bin.
    """
    # From the smallest to the largest; of equal sizes, later ones come first here and so are taken last.
    left = _Items((size, -index) for index, size in enumerate(sizes))
    bins: list[list[int]] = []
    room: list[int] = []

    def put(bin_number: int, size: int, index: int) -> None:
        bins[bin_number].append(index)
        room[bin_number] -= size

    for size, index in left.take_above(capacity / 2):
        bins.append([])
        room.append(capacity)
        put(len(bins) - 1, size, index)
    medium = _Items((size, -index) for size, index in left.take_above(capacity / 3))
    partnered = set()
    for number in range(len(bins)):
        if (found := medium.take_largest(room[number])) is not None:
            put(number, *found)
            partnered.add(number)
    small = _Items((size, -index) for size, index in left.take_above(capacity / 6))
    for number in reversed(range(len(bins))):
        if number not in partnered and small.two_smallest() <= room[number]:
            put(number, *small.take_smallest())
            second = small.take_largest(room[number])
            assert second is not None, "the smallest but one fits"
            put(number, *second)
    left = _Items((*left.items, *medium.items, *small.items))
    for number in range(len(bins)):
        while (found := left.take_largest(room[number])) is not None:
            put(number, *found)
    num_mixed = len(bins)
    for size, index in left.take_above(-1):
        number = next((n for n in range(num_mixed, len(bins)) if size <= room[n]), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(capacity)
        put(number, size, index)
    return bins


class _Items:
    """Holds the unpacked items as (size, -index), from the smallest to the largest; returns them as (size, index)."""

    def __init__(self, items: Iterable[tuple[int, int]]) -> None:
        self.items = sorted(items)

    def take_above(self, limit: float) -> list[tuple[int, int]]:
        """Takes the items larger than a limit, the largest first."""
        start = bisect_right(self.items, limit, key=lambda item: item[0])
        taken = self.items[start:]
        del self.items[start:]
        return [(size, -index) for size, index in reversed(taken)]

    def take_largest(self, room: int) -> tuple[int, int] | None:
        """Takes the largest item that fits into some room; None where none does."""
        end = bisect_right(self.items, room, key=lambda item: item[0])
        if end == 0:
            return None
        size, index = self.items.pop(end - 1)
        return size, -index

    def take_smallest(self) -> tuple[int, int]:
        """Takes the smallest item."""
        size, index = self.items.pop(0)
        return size, -index

    def two_smallest(self) -> float:
        """Returns the size of the two smallest together; infinite if there are fewer."""
        return self.items[0][0] + self.items[1][0] if len(self.items) > 1 else float("inf")
