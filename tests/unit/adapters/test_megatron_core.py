"""megatron-core's own offloading methods, done by the engine; real models and optimizers on a CPU."""

import gc

import pytest
from support.phases import delay_moves
from support.tiny_megatron import one_rank, tiny_megatron

from nemo_offload_rl.adapters.megatron_core import adopt_own_methods
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.table import Placement, Target


@pytest.fixture
def rank():
    with one_rank():
        yield
    gc.collect()  # models are cycles, and each holds threads of gloo's until it is collected
    assert PinnedArena.live_bytes() == 0


def offload_by_optimizer_and_model(job):
    job.optimizer.offload_to_cpu()
    job.model.offload_grad_buffers()
    yield
    job.model.restore_grad_buffers()
    job.optimizer.restore_from_cpu()


def offload_by_part_and_buffer(job):
    """As trainers that know no method for all do; the first call of each kind moves all of it."""
    for part in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        part.offload_to_cpu()
    for buffer in job.model.buffers:
        buffer.offload_to_cpu(move_params=True, move_grads=True)
    yield
    for buffer in job.model.buffers:
        buffer.reload_from_cpu(move_params=True, move_grads=True)
    for part in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        part.restore_from_cpu()


@pytest.mark.parametrize("use_distributed_optimizer", [True, False])
@pytest.mark.parametrize("way", [offload_by_optimizer_and_model, offload_by_part_and_buffer])
def test_steps_with_offloading_between_are_bit_equal_to_none(rank, monkeypatch, way, use_distributed_optimizer):
    plain = tiny_megatron(use_distributed_optimizer=use_distributed_optimizer)
    wanted = [plain.step(seed) for seed in range(10)]
    delay_moves(monkeypatch, seconds=0.003)
    job = tiny_megatron(use_distributed_optimizer=use_distributed_optimizer)
    state = adopt_own_methods([job.model], job.optimizer, PinnedArena())
    found, sizes = [], state.engine.nbytes()
    for seed in range(10):
        found.append(job.step(seed))
        moves = way(job)
        next(moves)
        where = state.engine.residency.where
        assert where(Target.OPTIMIZER_STATE) is Placement.HOST
        assert where(Target.GRADS) is Placement.DROPPED
        left = 0 if where(Target.PARAMS) is Placement.HOST else sizes[Target.PARAMS]
        assert state.engine.mapped_bytes == left
        next(moves, None)
    assert found == wanted
    state.close()


def test_gradients_alone_come_back_zeroed(rank):
    job = tiny_megatron()
    state = adopt_own_methods([job.model], job.optimizer, PinnedArena())
    job.forward_backward(0)
    grads = job.model.buffers[0].grad_data
    address = grads.data_ptr()
    assert grads.any()
    job.model.offload_grad_buffers(synchronize=False, empty_cache=False)
    assert state.engine.residency.where(Target.OPTIMIZER_STATE) is Placement.GPU
    job.model.restore_grad_buffers(synchronize=False)
    assert not grads.any()
    assert job.model.buffers[0].grad_data.data_ptr() == address
    state.close()


def test_a_model_without_an_optimizer_has_its_parameters_moved(rank):
    job = tiny_megatron(forward_only=True)
    state = adopt_own_methods([job.model], None, PinnedArena())
    state.move_params("cpu")
    assert state.engine.mapped_bytes == 0
    state.close()
