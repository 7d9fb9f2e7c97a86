import pytest
import torch
from support.ranges import Trouble, small_chunks

from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.flat_buffer import ALIGNMENT, BufferEntry, FlatBuffer
from nemo_offload_rl.residency.params_and_grads import tensors_by_storage
from nemo_offload_rl.residency.transfer import ChunkError, Mover

CPU = torch.device("cpu")
MIB = 2**20


def entry(name: str, *tensors: torch.Tensor) -> BufferEntry:
    return BufferEntry(name, tensors[0].untyped_storage(), list(tensors))


@pytest.fixture
def arena():
    with PinnedArena() as arena:
        yield arena


def test_tensors_move_in_as_they_are(arena):
    base = torch.randn(64, 8)
    turned, half = base.t(), base.view(-1)[7:200:3]
    small, flags = torch.arange(3, dtype=torch.int64), torch.tensor([True, False])
    wanted = [t.clone() for t in (base, turned, half, small, flags)]
    shapes = [(t.shape, t.stride(), t.dtype) for t in (base, turned, half, small, flags)]
    flat_buffer = FlatBuffer("params", CPU, arena, ranges=small_chunks)
    old = base.untyped_storage()
    flat_buffer.add([entry("base", base, turned, half), entry("small", small), entry("flags", flags)])
    assert old.nbytes() == 0
    memory = flat_buffer.backed_ranges[0].range.tensor
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    for tensor, want, shape in zip((base, turned, half, small, flags), wanted, shapes, strict=True):
        assert torch.equal(tensor, want)
        assert (tensor.shape, tensor.stride(), tensor.dtype) == shape
        assert begin <= tensor.data_ptr() < end
    base[0, 0] = 5
    assert turned[0, 0] == 5  # they still share memory
    assert [buffer_slice.offset % ALIGNMENT for buffer_slice in flat_buffer.slices] == [0, 0, 0]
    assert flat_buffer.nbytes == flat_buffer.mapped_bytes == 4 * ALIGNMENT + 2 * ALIGNMENT
    del memory
    flat_buffer.close()


def test_every_view_of_a_storage_is_found():
    base, other = torch.randn(10), torch.randn(10)
    views = {"first": base[:5], "list": [base[5:]], "detached": base.detach()}
    (found,) = tensors_by_storage([base.untyped_storage()]).values()
    assert {id(tensor) for tensor in found} == set(map(id, (base, views["first"], views["list"][0], views["detached"])))
    assert not any(tensor is other for tensor in found)


def test_growth_gets_a_home_of_its_own_and_a_successor_its_predecessors_place(arena):
    first, second = torch.randn(300), torch.randn(300)
    flat_buffer = FlatBuffer("optimizer_state", CPU, arena, ranges=small_chunks)
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
    flat_buffer.close()


def test_a_full_gpu_moves_out_again_what_had_moved_in(arena):
    trouble = Trouble()
    tensors = [torch.randn(MIB // 4) for _ in range(8)]
    wanted = [tensor.clone() for tensor in tensors]
    flat_buffer = FlatBuffer("optimizer_state", CPU, arena, ranges=trouble)
    trouble.chunks_left = 2
    with pytest.raises(OutOfGpuMemoryError, match="Cannot allocate the GPU memory range for tensor 4"):
        flat_buffer.add([entry(f"tensor {number}", tensor) for number, tensor in enumerate(tensors)])
    assert flat_buffer.backed_ranges == flat_buffer.slices == []
    assert arena.allocated_bytes == 0
    for tensor, want in zip(tensors, wanted, strict=True):
        assert torch.equal(tensor, want)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    trouble.chunks_left = None
    flat_buffer.add([entry(f"tensor {number}", tensor) for number, tensor in enumerate(tensors)])
    assert all(torch.equal(tensor, want) for tensor, want in zip(tensors, wanted, strict=True))
    flat_buffer.close()


def test_a_chunk_is_named_by_the_tenant_that_it_begins_in(arena):
    tensors = [torch.zeros(3 * MIB, dtype=torch.uint8) for _ in range(3)]
    flat_buffer = FlatBuffer("params", CPU, arena, ranges=small_chunks)
    flat_buffer.add([entry(f"tensor {number}", tensor) for number, tensor in enumerate(tensors)])
    (backed,) = flat_buffer.backed_ranges
    names = [flat_buffer.name_at(ChunkError(backed, chunk.start, "")) for chunk in backed.range.chunks]
    assert names == ["tensor 0", "tensor 0", "tensor 1", "tensor 2", "tensor 2"]
    flat_buffer.close()


def test_reading_from_the_host_shows_what_left_and_no_neighbours(arena):
    base = torch.randn(500)
    tensors = [torch.randn(300), base[100:400]]
    wanted = [tensor.clone() for tensor in tensors]
    flat_buffer, mover = FlatBuffer("params", CPU, arena, ranges=small_chunks), Mover(CPU, arena)
    flat_buffer.add([entry("whole", tensors[0]), entry("part", tensors[1], base)])
    addresses = [tensor.data_ptr() for tensor in tensors]
    mover.out(flat_buffer.backed_ranges).wait()
    views = [flat_buffer.host_view(tensor) for tensor in tensors]
    assert all(torch.equal(view, want) for view, want in zip(views, wanted, strict=True))
    assert [view.untyped_storage().nbytes() for view in views] == [1200, 1200]
    assert flat_buffer.host_view(torch.zeros(3)) is None
    transposed = flat_buffer.host_view(tensors[0].view(20, 15).t()[2:5])
    assert torch.equal(transposed, wanted[0].view(20, 15).t()[2:5])
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    del views, transposed
    mover.back(flat_buffer.backed_ranges).wait()
    assert all(torch.equal(tensor, want) for tensor, want in zip(tensors, wanted, strict=True))
    mover.close()
    flat_buffer.close()


def test_a_tensor_of_another_storage_at_the_same_address_is_not_taken_for_a_view():
    memory = bytearray(64)
    base, stale = torch.frombuffer(memory, dtype=torch.uint8), torch.frombuffer(memory, dtype=torch.uint8)
    view = base[8:]
    assert stale.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    [(address, found)] = tensors_by_storage([base.untyped_storage()]).items()
    assert address == base.untyped_storage().data_ptr()
    assert {id(tensor) for tensor in found} == {id(base), id(view)}
