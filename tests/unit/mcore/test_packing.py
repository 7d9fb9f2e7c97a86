import random

from nemo_offload_rl.mcore.batches import modified_first_fit_decreasing


def first_fit_decreasing(sizes, capacity):
    room = []
    for size in sorted(sizes, reverse=True):
        slot = next((n for n, free in enumerate(room) if size <= free), None)
        if slot is None:
            room.append(capacity)
            slot = len(room) - 1
        room[slot] -= size
    return len(room)


def sizes_of(bins, sizes):
    return [[sizes[index] for index in items] for items in bins]


def test_each_phase_does_its_part():
    # Large: 60, 52. Medium: 45, 36. Small: 20, 18. Tiny: 5.
    assert sizes_of(modified_first_fit_decreasing(sizes := [5, 20, 36, 52, 18, 45, 60], 100), sizes) == [
        [60, 36],  # the largest medium item that fits
        [52, 45],
        [20, 18, 5],  # first-fit decreasing of the rest
    ]
    # 76 has no medium partner and gets no pair: what fits, largest first. 55 gets a pair, smallest first.
    assert sizes_of(modified_first_fit_decreasing(sizes := [76, 55, 20, 22, 24, 3, 2], 100), sizes) == [
        [76, 22, 2],
        [55, 20, 24],
        [3],
    ]


def test_pairs_beside_large_items_save_a_bin():
    sizes = [61, 60, 21, 20, 19, 19]  # first-fit decreasing puts 21 beside 61, and wastes 18
    assert sizes_of(modified_first_fit_decreasing(sizes, 100), sizes) == [[61, 19, 20], [60, 19, 21]]
    assert first_fit_decreasing(sizes, 100) == 3


def test_every_item_is_in_one_bin_and_none_overflows():
    for seed in range(200):
        rng = random.Random(seed)
        capacity = rng.randint(1, 100)
        sizes = [rng.randint(1, 2 * capacity if seed % 3 == 0 else capacity) for _ in range(rng.randint(0, 80))]
        bins = modified_first_fit_decreasing(sizes, capacity)
        assert sorted(index for items in bins for index in items) == list(range(len(sizes)))
        for items in sizes_of(bins, sizes):
            assert sum(items) <= capacity or len(items) == 1
        least = sum(min(size, capacity) for size in sizes) / capacity
        assert len(bins) <= 71 / 60 * max(least, first_fit_decreasing(sizes, capacity)) + 1
        assert bins == modified_first_fit_decreasing(sizes, capacity)
