"""Host memory handed out by bytes."""

import itertools
import random

import torch

from nemo_offload_rl.offload import host_slab
from nemo_offload_rl.offload.host_slab import ALIGNMENT_BYTES, HostSlab

PAGE = ALIGNMENT_BYTES


class Done:
    def __init__(self, done: bool = False) -> None:
        self.done = done

    def reached(self) -> bool:
        return self.done


def slab(pages: int) -> HostSlab:
    return HostSlab(torch.zeros(pages * PAGE, dtype=torch.uint8))


def test_regions_never_overlap_and_gaps_grow_together():
    made = slab(64)
    chance = random.Random(0)
    held = []
    for _ in range(2000):
        if held and chance.random() < 0.5:
            made.give_back(held.pop(chance.randrange(len(held))), None)
        elif (region := made.take(chance.randint(1, 6 * PAGE))) is not None:
            held.append(region)
        spans = sorted((r.offset, r.offset + r.reserved_bytes) for r in held)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    for region in held:
        made.give_back(region, None)
    whole = made.take(64 * PAGE)
    assert whole is not None and whole.offset == 0
    assert made.used_bytes == made.peak_bytes == 64 * PAGE
    assert made.take(1) is None


def test_memory_that_a_copy_still_reads_says_so_to_its_next_owner():
    made = slab(4)
    one, other = made.take(2 * PAGE), made.take(2 * PAGE)
    reading, finished = Done(), Done(True)
    made.give_back(one, reading)
    made.give_back(other, finished)
    assert made.take(PAGE).after == (reading,)
    # What is left of the gap was, in part, the same memory.
    assert made.take(3 * PAGE).after == (reading,)


def test_a_region_is_cut_where_pages_were_locked(monkeypatch):
    monkeypatch.setattr(host_slab, "LOCK_CHUNK_BYTES", 2 * PAGE)
    made = slab(8)
    made.take(PAGE)
    region = made.take(4 * PAGE - 10)
    pieces = list(made.pieces(region))
    assert [(offset, len(piece)) for offset, piece in pieces] == [(0, PAGE), (PAGE, 2 * PAGE), (3 * PAGE, PAGE - 10)]
    for number, (_, piece) in enumerate(pieces):
        piece.fill_(number + 1)
    assert made._memory[PAGE : 5 * PAGE].unique().tolist() == [0, 1, 2, 3]


def test_no_memory_is_no_error():
    assert slab(0).take(1) is None
