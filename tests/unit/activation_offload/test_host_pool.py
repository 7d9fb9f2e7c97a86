"""Tests the pool of host memory, which groups are offloaded, and how far copies may lag and lead on a fast link."""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Interface,
)
from support.late_copies import LateCopies, LateTicket
from support.marked_layers import Model, batches, offloader

from nemo_offload_rl.activation_offload.copies import CopyHandle, Span
from nemo_offload_rl.activation_offload.schedule import choose_in_first_pass, choose_offloaded
from nemo_offload_rl.activation_offload.storage import ALIGNMENT_BYTES, PinnedHostPool, Region

PAGE = ALIGNMENT_BYTES


@dataclass(eq=False)
class Copy:
    copy_stream: str
    number: int
    done: bool = False

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
    assert take(made, 64 * PAGE).offset == 0
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
    assert set(take(made, 4 * PAGE).after) == {back[2]}  # it implies the two before it


def test_what_comes_back_to_a_closed_pool_is_not_lent_again():
    made = host_pool(2)
    region = take(made, PAGE)
    made.close()
    made.give_back(region, None)
    assert take(made, PAGE) is None
    assert made.used_bytes == 0


MODULES = ("qkv_linear", "core_attn", "attn_proj")
NUM_LAYERS = 16


class Link(LateCopies):
    """Makes copies at once, and records when a link of some speed would have, by a clock that `run` advances."""

    def __init__(self) -> None:
        super().__init__(eager_share=1.0)
        self.speed = 1.0  # bytes per unit of time
        self.now = 0.0
        self.waited = 0.0
        self._free_at = {"out": 0.0, "back": 0.0}
        self._done_at: dict[CopyHandle, float] = {}

    def run(self, time: float) -> None:
        self.now += time

    def rest(self) -> None:
        self.now = max(self.now, *self._free_at.values())

    def request(self, direction: str, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        after = list(after)
        handle = super().request(direction, spans, after)
        begin = max(self.now, self._free_at[direction], *(self._done_at[other] for other in after))
        self._free_at[direction] = self._done_at[handle] = begin + self.sizes[direction][-1] / self.speed
        return handle

    def wait(self, handle: CopyHandle) -> None:
        assert isinstance(handle, LateTicket) and handle.reached()
        self.waited += max(0.0, self._done_at[handle] - self.now)
        self.now = max(self.now, self._done_at[handle])


def clocked_model(link: Link) -> Model:
    """Makes a model whose layers take one unit of time forward, 0.4 of it in attention, and two backward."""
    torch.manual_seed(0)
    model = Model(MODULES, num_layers=NUM_LAYERS)
    for layer in model.layers:
        for module, time in ((layer.proj, 0.4), (layer.mlp, 0.6)):
            module.register_forward_hook(lambda *_, time=time: link.run(time))
            module.register_full_backward_hook(lambda *_, time=time: link.run(2 * time))
    return model


@pytest.mark.parametrize("fraction", [0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 1.0])
def test_no_wait_for_a_link_that_is_idle_for_a_fifth_of_the_forward_pass(fraction):
    """With fractions, a layer that is offloaded whole keeps the link busy for longer than a layer takes."""
    link = Link()
    model = clocked_model(link)
    made = offloader(model, link, modules=MODULES, fraction=fraction)
    waited: list[float] = []
    in_flight: list[int] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: in_flight.append(len(made._inflight)))
    for seed in range(4):
        (x,) = batches([8], seed)
        link.rest()
        loss = model(x)
        loss.backward()
        Interface.reset()
        moved, late = made.report.total().moved_bytes, made.report.total().late_bytes
        assert moved > 0
        assert late == 0 or seed == 0  # the first pass does not know the last layer yet, which has to stay
        waited.append(link.waited)
        link.waited = 0.0
        link.speed = moved / (0.8 * NUM_LAYERS)
    assert waited[2:] == [0.0, 0.0]  # the first two passes measure the pass and the speed
    num_groups = 2  # per layer; attn_proj saves the storage that core_attn saves
    assert max(in_flight[2 * NUM_LAYERS :]) <= (num_groups if fraction == 1 else 2 * num_groups)


def test_they_leave_a_layer_ahead_of_an_even_pace():
    assert choose_offloaded([[8, 8]] * 4, 0.5) == [True, True, False, True, False, True, False, False]
    assert choose_offloaded([[8]] * 6, 0.5) == [True, False, True, False, True, False]
    assert choose_offloaded([], 1.0) == choose_offloaded([[], []], 0.5) == choose_in_first_pass([[]], 0.5) == []


each_fraction = pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.77, 1.0])


@each_fraction
def test_what_leaves_is_the_fraction_to_within_a_group(fraction):
    chance = random.Random(0)
    for _ in range(50):
        layers = [[chance.randint(1, 9) for _ in range(chance.randint(1, 4))] for _ in range(chance.randint(1, 20))]
        sizes = list(itertools.chain(*layers))
        left = sum(itertools.compress(sizes, choose_offloaded(layers, fraction)))
        assert fraction * sum(sizes) - 9 <= left <= fraction * sum(sizes)


@each_fraction
def test_in_the_first_pass_no_more_than_the_fraction_has_left_at_any_group(fraction):
    chance = random.Random(0)
    for _ in range(50):
        sizes = [chance.randint(1, 9) for _ in range(chance.randint(1, 40))]
        seen = left = 0
        for nbytes, goes in zip(sizes, choose_in_first_pass([sizes], fraction), strict=True):
            seen += nbytes
            left += nbytes if goes else 0
            assert fraction * seen - 9 <= left <= fraction * seen
