import threading
import time

import pytest
import torch
from support.ranges import CHUNK_BYTES, Trouble

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.transfer import BackedRange, ChunkError, Gate, Mover

CPU = torch.device("cpu")
SIZES = (5 * CHUNK_BYTES + 1000, 700)


@pytest.fixture
def arena():
    with PinnedArena() as arena:
        yield arena


@pytest.fixture
def mover(arena):
    mover = Mover(CPU, arena)
    yield mover
    mover.close()


@pytest.fixture
def trouble():
    return Trouble()


@pytest.fixture
def backed_ranges(arena, trouble):
    """Returns two backed ranges, mapped and filled."""
    backed_ranges = [BackedRange(trouble(nbytes, CPU, CHUNK_BYTES), arena.allocate("test", nbytes)) for nbytes in SIZES]
    for backed in backed_ranges:
        for index in range(len(backed.range.chunks)):
            backed.range.map(index)
        backed.range.tensor.random_(0, 256)
    yield backed_ranges
    for backed in backed_ranges:
        backed.range.close()
        arena.release(backed.host)


def contents(backed_ranges):
    return [backed.range.tensor.clone() for backed in backed_ranges]


def mapped(backed_ranges):
    return sum(backed.range.mapped_bytes for backed in backed_ranges)


def assert_equal(found, wanted):
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_round_trip_is_exact_and_gives_the_memory_back_between(mover, backed_ranges):
    wanted = contents(backed_ranges)
    out = mover.out(backed_ranges)
    out.wait()
    assert mapped(backed_ranges) == 0
    assert out.nbytes == sum(SIZES)
    assert all(torch.equal(backed.host_tensor(), want) for backed, want in zip(backed_ranges, wanted, strict=True))
    back = mover.back(backed_ranges)
    back.wait_on_current_stream()
    assert mapped(backed_ranges) == sum(SIZES) == back.nbytes
    assert_equal(contents(backed_ranges), wanted)


def test_moves_end_in_the_order_they_were_asked_for(mover, backed_ranges, trouble):
    wanted = contents(backed_ranges)
    trouble.delay_s = 0.02
    moves = [mover.out(backed_ranges), mover.back(backed_ranges)]
    moves[-1].wait()
    assert all(move.is_queued for move in moves)
    assert_equal(contents(backed_ranges), wanted)


def test_a_move_back_is_under_way_when_the_call_returns(mover, backed_ranges, trouble):
    mover.out(backed_ranges).wait()
    trouble.delay_s = 0.05
    start = time.perf_counter()
    back = mover.back(backed_ranges)
    asked = time.perf_counter() - start
    assert not back.is_queued
    back.wait_on_current_stream()
    took = time.perf_counter() - start
    num_chunks = sum(len(backed.range.chunks) for backed in backed_ranges)
    assert asked < took / 2
    assert took >= num_chunks * trouble.delay_s
    assert back.exposed_seconds() == pytest.approx(took - asked, abs=0.1)
    assert 0 < back.copy_seconds() < took
    mover.out(backed_ranges).wait()
    back = mover.back(backed_ranges)
    while not back.is_queued:
        time.sleep(0.005)
    back.wait_on_current_stream()
    assert back.exposed_seconds() < back.copy_seconds() / 2  # what is hidden is not exposed


@pytest.mark.parametrize("chunk", [0, 1, 5, 6])
def test_a_full_gpu_gives_back_what_had_been_taken_and_says_where(mover, backed_ranges, trouble, chunk):
    wanted = contents(backed_ranges)
    mover.out(backed_ranges).wait()
    trouble.chunks_left = chunk
    back = mover.back(backed_ranges)
    with pytest.raises(ChunkError) as raised:
        back.wait()
    places = [(backed, piece.start) for backed in backed_ranges for piece in backed.range.chunks]
    assert (raised.value.backed, raised.value.offset) == places[chunk]
    assert mapped(backed_ranges) == 0
    trouble.chunks_left = None
    mover.back(backed_ranges).wait()
    assert_equal(contents(backed_ranges), wanted)


def test_dropped_memory_comes_back_mapped(mover, backed_ranges):
    drop = mover.drop(backed_ranges)
    drop.wait()
    assert mapped(backed_ranges) == 0
    take = mover.take(backed_ranges)
    take.wait_on_current_stream()
    assert mapped(backed_ranges) == sum(SIZES)
    assert drop.nbytes == take.nbytes == 0
    assert drop.copy_seconds() == take.copy_seconds() == 0.0


def test_dropped_memory_is_free_before_earlier_copies_end(mover, backed_ranges):
    first, last = backed_ranges[0], backed_ranges[-1]
    gate = Gate()
    out = mover.out([first], gate)  # its thread waits for the gate
    mover.drop([last]).wait()
    assert not out.is_queued
    assert mapped([last]) == 0
    gate.open()
    out.wait()


@pytest.mark.parametrize("move", ["take", "back"])
def test_memory_that_is_being_dropped_is_found(mover, backed_ranges, trouble, monkeypatch, move):
    coming, dropped = backed_ranges
    mover.out([coming]).wait()
    kernels_end = threading.Event()

    def unmap(index: int, unmap=dropped.range.unmap) -> None:
        assert kernels_end.wait(10)  # as a drop waits for kernels that were queued before it
        unmap(index)
        trouble.chunks_left = None

    monkeypatch.setattr(dropped.range, "unmap", unmap)
    trouble.chunks_left = 2  # it finds the rest of its memory only where the other range is dropped
    drop = mover.drop([dropped])
    arrival = getattr(mover, move)([coming])
    time.sleep(0.05)
    kernels_end.set()
    arrival.wait()
    drop.wait()
    assert mapped([coming]) == SIZES[0]
    assert mapped([dropped]) == 0


def test_exchange_puts_others_in_and_restore_brings_the_own_back(mover, backed_ranges, arena):
    own = contents(backed_ranges)
    others = [BackedRange(backed.range, arena.allocate("others", backed.range.nbytes)) for backed in backed_ranges]
    for other in others:
        other.host.tensor.random_(0, 256)
    foreign = [other.host.tensor.clone() for other in others]
    mover.exchange(backed_ranges, others)
    assert_equal(contents(backed_ranges), foreign)
    mover.restore(backed_ranges)
    assert_equal(contents(backed_ranges), own)
    assert_equal([other.host.tensor for other in others], foreign)
    for other in others:
        arena.release(other.host)


def test_an_exchange_that_fails_says_what_has_to_be_put_back(mover, backed_ranges, arena, monkeypatch):
    own, copy_back, copied, changed = contents(backed_ranges), mover._copy_back, [], []
    others = [BackedRange(backed.range, arena.allocate("others", backed.range.nbytes)) for backed in backed_ranges]

    def fail_at_the_third(backed, chunk):
        copied.append(chunk)
        copy_back(backed, chunk)
        if len(copied) == 3:
            raise MemoryError

    monkeypatch.setattr(mover, "_copy_back", fail_at_the_third)
    with pytest.raises(MemoryError):
        mover.exchange(backed_ranges, others, changed)
    assert changed == [(backed_ranges[0], chunk) for chunk in backed_ranges[0].range.chunks[:3]]
    back = mover.put_back(changed)
    assert back.nbytes == 3 * CHUNK_BYTES
    assert_equal(contents(backed_ranges), own)
    for other in others:
        arena.release(other.host)


def test_closing_twice_gives_staging_buffers_back_once(arena):
    mover = Mover(CPU, arena)
    with mover._ring(mover._out):
        assert arena.allocated_bytes > 0
    for _ in range(2):
        mover.close()
        assert arena.allocated_bytes == 0
