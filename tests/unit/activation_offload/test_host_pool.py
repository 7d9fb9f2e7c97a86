"""Tests the pool that hands out host memory by bytes."""

import itertools
import random

import pytest
import torch

from nemo_offload_rl.activation_offload.storage import ALIGNMENT_BYTES, PinnedHostPool, Region

PAGE = ALIGNMENT_BYTES


class Copy:
    """Represents a copy of a copy stream, which makes its copies in order."""

    def __init__(self, copy_stream: str, number: int, done: bool = False) -> None:
        self.copy_stream, self.number, self.done = copy_stream, number, done

    def reached(self) -> bool:
        return self.done

    def covers(self, other: "Copy") -> bool:
        return self.copy_stream == other.copy_stream and self.number >= other.number


def host_pool(pages: int) -> PinnedHostPool:
    return PinnedHostPool(torch.zeros(pages * PAGE, dtype=torch.uint8))


def take(made: PinnedHostPool, nbytes: int) -> Region | None:
    regions = made.take_all([nbytes])
    return None if regions is None else regions[0]


def test_regions_never_overlap_and_gaps_grow_together():
    made = host_pool(64)
    chance = random.Random(0)
    held = []
    for _ in range(2000):
        if held and chance.random() < 0.5:
            for _ in range(chance.randint(1, len(held))):
                made.give_back(held.pop(chance.randrange(len(held))), None)
        else:
            held += made.take_all([chance.randint(0, 6 * PAGE) for _ in range(chance.randint(1, 3))]) or []
        spans = sorted((r.offset, r.offset + r.reserved_bytes) for r in held)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    for region in held:
        made.give_back(region, None)
    whole = take(made, 64 * PAGE)
    assert whole is not None and whole.offset == 0
    assert made.used_bytes == made.peak_bytes == 64 * PAGE
    assert take(made, 1) is None


def test_memory_that_a_copy_still_reads_says_so_to_its_next_owner():
    made = host_pool(4)
    regions = [take(made, PAGE) for _ in range(4)]
    back = [Copy("back", number) for number in range(3)]
    out = Copy("out", 9)
    for region, copy in zip(regions, (back[1], back[0], out, back[2]), strict=True):
        made.give_back(region, copy)
    # The last copy of each copy stream: it completes after those before it. All four pages are one gap again.
    first = take(made, PAGE)
    assert set(first.after) == {back[2], out}
    assert set(take(made, 3 * PAGE).after) == {back[2], out}


def test_a_copy_stands_for_those_that_it_follows():
    made = host_pool(1)
    out, back = Copy("out", 0), Copy("back", 1)
    made.give_back(take(made, PAGE), out)
    made.give_back(take(made, PAGE), back)  # a copy after `out` filled this memory
    region = take(made, PAGE)
    assert region.after == (back,)
    made.give_back(region, None)  # nothing was copied
    assert take(made, PAGE).after == (back,)


def test_free_memory_forgets_copies_that_are_done():
    made = host_pool(4)
    copies = [Copy("back", 0, done=True), Copy("out", 1)]
    for region, copy in zip([take(made, 2 * PAGE), take(made, 2 * PAGE)], copies, strict=True):
        made.give_back(region, copy)
    made.forget_reached()
    assert take(made, PAGE).after == (copies[1],)
    copies[1].done = True
    made.forget_reached()
    assert take(made, PAGE).after == ()


def test_regions_of_one_call_are_side_by_side_if_there_is_such_a_gap():
    made = host_pool(8)
    assert made.take_all([PAGE, 8 * PAGE]) is None
    held = [take(made, 2 * PAGE) for _ in range(4)]
    made.give_back(held[0], None)
    made.give_back(held[2], None)
    assert [region.offset for region in made.take_all([2 * PAGE, PAGE])] == [0, 4 * PAGE]
    made.give_back(held[3], None)  # three pages with the rest of the third region
    assert [region.offset for region in made.take_all([PAGE + 1, PAGE])] == [5 * PAGE, 7 * PAGE]
    assert made.used_bytes == 8 * PAGE


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]], ids=str)
def test_regions_of_one_call_come_back_in_any_order(order):
    made = host_pool(4)
    regions = made.take_all([PAGE, PAGE, PAGE])
    back = [Copy("back", 0), Copy("back", 0), Copy("back", 1)]
    for index in order:
        made.give_back(regions[index], back[index])
    whole = take(made, 4 * PAGE)
    assert whole is not None and set(whole.after) == {back[2]}  # it implies the two before it


def test_what_comes_back_to_a_closed_pool_is_not_lent_again():
    made = host_pool(2)
    region = take(made, PAGE)
    made.close()
    made.give_back(region, None)
    assert take(made, PAGE) is None
    assert made.used_bytes == 0
