import pytest
import torch
from support.ranges import Trouble, small_chunks

from nemo_offload_rl.offload.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.offload.housing import ALIGNMENT, Housing, Tenant, tensors_by_storage
from nemo_offload_rl.offload.pinned_arena import PinnedArena
from nemo_offload_rl.offload.transfer import ChunkError, Mover

CPU = torch.device("cpu")
MIB = 2**20


def tenant(name: str, *tensors: torch.Tensor) -> Tenant:
    return Tenant(name, tensors[0].untyped_storage(), list(tensors))


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
    housing = Housing("params", CPU, arena, ranges=small_chunks)
    housing.add([tenant("base", base, turned, half), tenant("small", small), tenant("flags", flags)])
    memory = housing.homes[0].range.tensor
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    for tensor, want, shape in zip((base, turned, half, small, flags), wanted, shapes, strict=True):
        assert torch.equal(tensor, want)
        assert (tensor.shape, tensor.stride(), tensor.dtype) == shape
        assert begin <= tensor.data_ptr() < end
    base[0, 0] = 5
    assert turned[0, 0] == 5  # still one memory
    assert [slot.offset % ALIGNMENT for slot in housing.slots] == [0, 0, 0]
    assert housing.nbytes == housing.mapped_bytes == 4 * ALIGNMENT + 2 * ALIGNMENT
    del memory
    housing.close()


def test_the_old_memory_is_given_up(arena):
    tensor = torch.randn(1000)
    old = tenant("only", tensor)
    housing = Housing("params", CPU, arena, ranges=small_chunks)
    housing.add([old])
    assert old.storage.nbytes() == 0
    housing.close()


def test_a_parameter_keeps_its_object_and_goes_on_learning(arena):
    parameter = torch.nn.Parameter(torch.ones(10))
    (parameter * 2).sum().backward()
    housing = Housing("params", CPU, arena, ranges=small_chunks)
    housing.add([tenant("weight", parameter)])
    (parameter * 3).sum().backward()
    assert parameter.is_leaf
    assert parameter.grad.eq(5).all()
    housing.close()


def test_what_is_looked_into_by_somebody_unknown_is_refused(arena):
    tensor, housing = torch.randn(10), Housing("params", CPU, arena, ranges=small_chunks)
    view = tensor[2:4]
    with pytest.raises(ValueError, match="shy is also used by 1 tensors or graphs that could not be found"):
        housing.add([tenant("shy", tensor)])
    assert view.shape == (2,)
    arena._release_all()


def test_every_view_of_a_storage_is_found():
    base, other = torch.randn(10), torch.randn(10)
    views = {"first": base[:5], "list": [base[5:]], "detached": base.detach()}
    (found,) = tensors_by_storage([base.untyped_storage()]).values()
    assert {id(tensor) for tensor in found} == {
        id(base),
        id(views["first"]),
        id(views["list"][0]),
        id(views["detached"]),
    }
    assert not any(tensor is other for tensor in found)


def test_growth_gets_a_home_of_its_own_and_a_successor_its_predecessors_place(arena):
    first, second = torch.randn(300), torch.randn(300)
    housing = Housing("optimizer_state", CPU, arena, ranges=small_chunks)
    housing.add([tenant("exp_avg[0]", first), tenant("exp_avg[1]", second)])
    address = second.data_ptr()
    successor, newcomer = torch.randn(300), torch.randn(5)
    wanted = successor.clone()
    housing.add_or_replace([tenant("exp_avg[1]", successor), tenant("exp_avg[2]", newcomer)])
    assert successor.data_ptr() == address
    assert torch.equal(successor, wanted)
    assert [len(home.range.chunks) for home in housing.homes] == [1, 1]
    assert [slot.name for slot in housing.slots] == ["exp_avg[0]", "exp_avg[1]", "exp_avg[2]"]
    larger = torch.randn(301)  # as after a change of the parallel layout
    housing.add_or_replace([tenant("exp_avg[0]", larger)])
    assert len(housing.homes) == 3
    housing.close()


def test_a_full_gpu_moves_out_again_what_had_moved_in(arena):
    trouble = Trouble()
    tensors = [torch.randn(MIB // 4) for _ in range(8)]
    wanted = [tensor.clone() for tensor in tensors]
    housing = Housing("optimizer_state", CPU, arena, ranges=trouble)
    trouble.chunks_left = 2
    with pytest.raises(OutOfGpuMemoryError, match="tensor 4 cannot move into a range"):
        housing.add([tenant(f"tensor {number}", tensor) for number, tensor in enumerate(tensors)])
    assert housing.homes == housing.slots == []
    assert arena.allocated_bytes == 0
    for tensor, want in zip(tensors, wanted, strict=True):
        assert torch.equal(tensor, want)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    trouble.chunks_left = None
    housing.add([tenant(f"tensor {number}", tensor) for number, tensor in enumerate(tensors)])
    assert all(torch.equal(tensor, want) for tensor, want in zip(tensors, wanted, strict=True))
    housing.close()


def test_a_chunk_is_named_by_the_tenant_that_it_begins_in(arena):
    tensors = [torch.zeros(3 * MIB, dtype=torch.uint8) for _ in range(3)]
    housing = Housing("params", CPU, arena, ranges=small_chunks)
    housing.add([tenant(f"tensor {number}", tensor) for number, tensor in enumerate(tensors)])
    (home,) = housing.homes
    names = [housing.name_at(ChunkError(home, chunk.start, "")) for chunk in home.range.chunks]
    assert names == ["tensor 0", "tensor 0", "tensor 1", "tensor 2", "tensor 2"]
    housing.close()


def test_reading_from_the_host_shows_what_left_and_no_neighbours(arena):
    base = torch.randn(500)
    tensors = [torch.randn(300), base[100:400]]
    wanted = [tensor.clone() for tensor in tensors]
    housing, mover = Housing("params", CPU, arena, ranges=small_chunks), Mover(CPU, arena)
    housing.add([tenant("whole", tensors[0]), tenant("part", tensors[1], base)])
    addresses = [tensor.data_ptr() for tensor in tensors]
    mover.out(housing.homes).wait()
    views = [housing.host_view(tensor) for tensor in tensors]
    assert all(torch.equal(view, want) for view, want in zip(views, wanted, strict=True))
    assert [view.untyped_storage().nbytes() for view in views] == [1200, 1200]
    assert housing.host_view(torch.zeros(3)) is None
    transposed = housing.host_view(tensors[0].view(20, 15).t()[2:5])
    assert torch.equal(transposed, wanted[0].view(20, 15).t()[2:5])
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    del views, transposed
    mover.back(housing.homes).wait()
    assert all(torch.equal(tensor, want) for tensor, want in zip(tensors, wanted, strict=True))
    mover.close()
    housing.close()
