"""Tests moves of ranges between two places of host memory, and buffers of tensors in such ranges."""

import threading
import time

import pytest
import torch
from support.ranges import CHUNK_BYTES, Trouble, small_chunks

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.flat_buffer import ALIGNMENT, BufferEntry, FlatBuffer
from nemo_offload_rl.residency.params_and_grads import tensors_by_storage
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
    backed_ranges = [BackedRange(trouble(nbytes, CPU, CHUNK_BYTES), arena.allocate("test", nbytes)) for nbytes in SIZES]
    for backed in backed_ranges:
        for index in range(len(backed.range.chunks)):
            backed.range.map(index)
        backed.range.tensor.random_(0, 256)
    yield backed_ranges
    for backed in backed_ranges:
        backed.range.close()
        arena.release(backed.host)


@pytest.fixture
def flat_buffer(arena):
    flat_buffer = FlatBuffer("params", CPU, arena, ranges=small_chunks)
    yield flat_buffer
    flat_buffer.close()


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
    assert_equal([backed.host_tensor() for backed in backed_ranges], wanted)
    back = mover.back(backed_ranges)
    back.wait_on_current_stream()
    assert mapped(backed_ranges) == sum(SIZES) == back.nbytes
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


MIB = 2**20


def entry(name: str, *tensors: torch.Tensor) -> BufferEntry:
    return BufferEntry(name, tensors[0].untyped_storage(), list(tensors))


def test_tensors_move_in_as_they_are(flat_buffer):
    base = torch.randn(64, 8)
    turned, half = base.t(), base.view(-1)[7:200:3]
    small, flags = torch.arange(3, dtype=torch.int64), torch.tensor([True, False])
    tensors = (base, turned, half, small, flags)
    wanted = [tensor.clone() for tensor in tensors]
    shapes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
    old = base.untyped_storage()
    flat_buffer.add([entry("base", base, turned, half), entry("small", small), entry("flags", flags)])
    assert old.nbytes() == 0
    memory = flat_buffer.backed_ranges[0].range.tensor
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    for tensor, want, shape in zip(tensors, wanted, shapes, strict=True):
        assert torch.equal(tensor, want)
        assert (tensor.shape, tensor.stride(), tensor.dtype) == shape
        assert begin <= tensor.data_ptr() < end
    base[0, 0] = 5
    assert turned[0, 0] == 5  # they still share memory
    assert [buffer_slice.offset % ALIGNMENT for buffer_slice in flat_buffer.slices] == [0, 0, 0]
    assert flat_buffer.nbytes == flat_buffer.mapped_bytes == 4 * ALIGNMENT + 2 * ALIGNMENT


def test_every_view_of_a_storage_is_found():
    base = torch.randn(10)
    views = {"first": base[:5], "list": [base[5:]], "detached": base.detach()}
    (found,) = tensors_by_storage([base.untyped_storage()]).values()
    assert {id(tensor) for tensor in found} == set(map(id, (base, views["first"], views["list"][0], views["detached"])))


def test_growth_gets_a_home_of_its_own_and_a_successor_its_predecessors_place(flat_buffer):
    first, second = torch.randn(300), torch.randn(300)
    flat_buffer.add([entry("exp_avg[0]", first), entry("exp_avg[1]", second)])
    address = second.data_ptr()
    successor, newcomer = torch.randn(300), torch.randn(5)
    wanted = successor.clone()
    flat_buffer.add_or_replace([entry("exp_avg[1]", successor), entry("exp_avg[2]", newcomer)])
    assert successor.data_ptr() == address
    assert torch.equal(successor, wanted)
    assert [len(backed.range.chunks) for backed in flat_buffer.backed_ranges] == [1, 1]
    assert [buffer_slice.name for buffer_slice in flat_buffer.slices] == ["exp_avg[0]", "exp_avg[1]", "exp_avg[2]"]
    larger = torch.randn(301)  # as after a change of the parallel layout
    flat_buffer.add_or_replace([entry("exp_avg[0]", larger)])
    assert len(flat_buffer.backed_ranges) == 3


def test_a_chunk_is_named_by_the_tenant_that_it_begins_in(flat_buffer):
    tensors = [torch.zeros(3 * MIB, dtype=torch.uint8) for _ in range(3)]
    flat_buffer.add([entry(f"tensor {number}", tensor) for number, tensor in enumerate(tensors)])
    (backed,) = flat_buffer.backed_ranges
    names = [flat_buffer.name_at(ChunkError(backed, chunk.start, "")) for chunk in backed.range.chunks]
    assert names == ["tensor 0", "tensor 0", "tensor 1", "tensor 2", "tensor 2"]


def test_reading_from_the_host_shows_what_left_and_no_neighbours(mover, flat_buffer):
    base = torch.randn(500)
    tensors = [torch.randn(300), base[100:400]]
    wanted = [tensor.clone() for tensor in tensors]
    flat_buffer.add([entry("whole", tensors[0]), entry("part", tensors[1], base)])
    addresses = [tensor.data_ptr() for tensor in tensors]
    mover.out(flat_buffer.backed_ranges).wait()
    views = [flat_buffer.host_view(tensor) for tensor in tensors]
    assert_equal(views, wanted)
    assert [view.untyped_storage().nbytes() for view in views] == [1200, 1200]
    assert flat_buffer.host_view(torch.zeros(3)) is None
    transposed = flat_buffer.host_view(tensors[0].view(20, 15).t()[2:5])
    assert torch.equal(transposed, wanted[0].view(20, 15).t()[2:5])
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    del views, transposed
    mover.back(flat_buffer.backed_ranges).wait()
    assert_equal(tensors, wanted)


def test_a_tensor_of_another_storage_at_the_same_address_is_not_taken_for_a_view():
    memory = bytearray(64)
    base, stale = torch.frombuffer(memory, dtype=torch.uint8), torch.frombuffer(memory, dtype=torch.uint8)
    view = base[8:]
    assert stale.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    [(address, found)] = tensors_by_storage([base.untyped_storage()]).items()
    assert address == base.untyped_storage().data_ptr()
    assert {id(tensor) for tensor in found} == {id(base), id(view)}
