import time

import pytest
import torch
from support.ranges import CHUNK_BYTES, Trouble

from nemo_offload_rl.offload.pinned_arena import PinnedArena
from nemo_offload_rl.offload.transfer import ChunkError, Home, Mover

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
def homes(arena, trouble):
    """Two homes, mapped and filled."""
    homes = [Home(trouble(nbytes, CPU, CHUNK_BYTES), arena.allocate("test", nbytes)) for nbytes in SIZES]
    for home in homes:
        for index in range(len(home.range.chunks)):
            home.range.map(index)
        home.range.tensor.random_(0, 256)
    yield homes
    for home in homes:
        home.range.close()
        arena.release(home.host)


def contents(homes):
    return [home.range.tensor.clone() for home in homes]


def mapped(homes):
    return sum(home.range.mapped_bytes for home in homes)


def assert_equal(found, wanted):
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def leave(mover, homes):
    return mover.out(homes)


def test_a_round_trip_is_exact_and_gives_the_memory_back_between(mover, homes):
    wanted = contents(homes)
    out = leave(mover, homes)
    out.wait()
    assert mapped(homes) == 0
    assert out.nbytes == sum(SIZES)
    assert all(torch.equal(home.host_tensor(), want) for home, want in zip(homes, wanted, strict=True))
    back = mover.back(homes)
    back.hold_current_stream()
    assert mapped(homes) == sum(SIZES) == back.nbytes
    assert_equal(contents(homes), wanted)


def test_moves_end_in_the_order_they_were_asked_for(mover, homes, trouble):
    wanted = contents(homes)
    trouble.delay_s = 0.02
    moves = [leave(mover, homes), mover.back(homes)]
    moves[-1].wait()
    assert all(move.is_queued for move in moves)
    assert_equal(contents(homes), wanted)


def test_a_move_back_is_under_way_when_the_call_returns(mover, homes, trouble):
    leave(mover, homes).wait()
    trouble.delay_s = 0.05
    start = time.perf_counter()
    back = mover.back(homes)
    asked = time.perf_counter() - start
    assert not back.is_queued
    back.hold_current_stream()
    took = time.perf_counter() - start
    num_chunks = sum(len(home.range.chunks) for home in homes)
    assert asked < took / 2
    assert took >= num_chunks * trouble.delay_s
    assert back.exposed_seconds() == pytest.approx(took - asked, abs=0.1)
    assert 0 < back.copy_seconds() < took


def test_hidden_time_is_not_exposed(mover, homes, trouble):
    leave(mover, homes).wait()
    trouble.delay_s = 0.02
    back = mover.back(homes)
    while not back.is_queued:
        time.sleep(0.005)
    back.hold_current_stream()
    assert back.exposed_seconds() < 0.05 < back.copy_seconds()


@pytest.mark.parametrize("chunk", [0, 1, 5, 6])
def test_a_full_gpu_gives_back_what_had_been_taken_and_says_where(mover, homes, trouble, chunk):
    wanted = contents(homes)
    leave(mover, homes).wait()
    trouble.chunks_left = chunk
    back = mover.back(homes)
    with pytest.raises(ChunkError) as raised:
        back.wait()
    places = [(home, piece.start) for home in homes for piece in home.range.chunks]
    assert (raised.value.home, raised.value.offset) == places[chunk]
    assert mapped(homes) == 0
    trouble.chunks_left = None
    mover.back(homes).wait()
    assert_equal(contents(homes), wanted)


def test_dropped_memory_comes_back_mapped(mover, homes):
    drop = mover.drop(homes)
    drop.wait()
    assert mapped(homes) == 0
    take = mover.take(homes)
    take.hold_current_stream()
    assert mapped(homes) == sum(SIZES)
    assert drop.nbytes == take.nbytes == 0
    assert drop.copy_seconds() == take.copy_seconds() == 0.0


def test_exchange_puts_others_in_and_restore_brings_the_own_back(mover, homes, arena):
    own = contents(homes)
    others = [Home(home.range, arena.allocate("others", home.range.nbytes)) for home in homes]
    for other in others:
        other.host.tensor.random_(0, 256)
    foreign = [other.host.tensor.clone() for other in others]
    mover.exchange(homes, others)
    assert_equal(contents(homes), foreign)
    mover.restore(homes)
    assert_equal(contents(homes), own)
    assert_equal([other.host.tensor for other in others], foreign)
    for other in others:
        arena.release(other.host)


def test_saving_leaves_everything_in_place(mover, homes):
    wanted = contents(homes)
    mover.save(homes)
    assert mapped(homes) == sum(SIZES)
    assert_equal([home.host_tensor() for home in homes], wanted)
    assert_equal(contents(homes), wanted)


def test_an_exchange_that_fails_says_what_has_to_be_put_back(mover, homes, arena, monkeypatch):
    own, copy_back, copied, changed = contents(homes), mover._copy_back, [], []
    others = [Home(home.range, arena.allocate("others", home.range.nbytes)) for home in homes]

    def fail_at_the_third(home, chunk):
        copied.append(chunk)
        copy_back(home, chunk)
        if len(copied) == 3:
            raise MemoryError

    monkeypatch.setattr(mover, "_copy_back", fail_at_the_third)
    with pytest.raises(MemoryError):
        mover.exchange(homes, others, changed)
    assert changed == [(homes[0], chunk) for chunk in homes[0].range.chunks[:3]]
    back = mover.put_back(changed)
    assert back.nbytes == 3 * CHUNK_BYTES
    assert_equal(contents(homes), own)
    for other in others:
        arena.release(other.host)


def test_closing_twice_gives_staging_buffers_back_once(arena):
    mover = Mover(CPU, arena)
    with mover._ring(mover._out):
        assert arena.allocated_bytes > 0
    for _ in range(2):
        mover.close()
        assert arena.allocated_bytes == 0
