"""Tests megatron-core's own offloading methods as the engine implements them; real models and optimizers."""

import copy

import pytest
import torch
from support.jobs import assert_equal
from support.phases import delay_moves
from support.tiny_megatron import tiny_megatron

from nemo_offload_rl.adapters.megatron_core import adopt_own_methods
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.optimizer_state import state_tensors
from nemo_offload_rl.residency.table import Placement, Target
from nemo_offload_rl.residency.target import ResidencyError


@pytest.fixture
def adopted(rank):
    """Adopts jobs; closes them when the test ends."""
    made = []

    def make(job):
        made.append(adopt_own_methods([job.model], job.optimizer, PinnedArena()))
        return made[-1]

    yield make
    for state in made:
        state.close()


AWAY = "optimizer_state is needed on the GPU, but it is host"


def offload_by_optimizer_and_model(job):
    job.optimizer.offload_to_cpu()
    job.model.offload_grad_buffers()
    yield
    job.model.restore_grad_buffers()
    job.optimizer.restore_from_cpu()


def offload_by_part_and_buffer(job):
    """Offloads as trainers do that know no method for all state; the first call of a kind moves all of that kind."""
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
def test_steps_with_offloading_between_are_bit_equal_to_none(adopted, monkeypatch, way, use_distributed_optimizer):
    plain = tiny_megatron(use_distributed_optimizer=use_distributed_optimizer)
    wanted = [plain.step(seed) for seed in range(10)]
    delay_moves(monkeypatch, seconds=0.003)
    job = tiny_megatron(use_distributed_optimizer=use_distributed_optimizer)
    state = adopted(job)
    found = []
    for seed in range(10):
        found.append(job.step(seed))
        moves = way(job)
        next(moves)
        where = state.offloader.residency.where
        assert where(Target.OPTIMIZER_STATE) is Placement.HOST
        assert where(Target.GRADS) is Placement.DROPPED
        left = {name for name, target in state.offloader.targets.items() if target.mapped_bytes}
        assert left == (set() if where(Target.PARAMS) is Placement.HOST else {Target.PARAMS})
        next(moves, None)
    assert found == wanted


def test_what_is_loaded_right_behind_the_start_of_the_return_stays(adopted, monkeypatch):
    job = tiny_megatron(use_distributed_optimizer=False)
    state = adopted(job)
    job.step(0)
    saved, wanted = copy.deepcopy(job.optimizer.state_dict()), job.optimizer_state()
    job.step(1)
    before = job.optimizer_state()
    delay_moves(monkeypatch, seconds=0.05)
    job.optimizer.offload_to_cpu()
    with pytest.raises(ResidencyError, match=AWAY):
        job.optimizer.load_state_dict(copy.deepcopy(saved))
    job.optimizer.restore_from_cpu()
    state.offloader.residency.require(Target.OPTIMIZER_STATE)
    assert_equal(job.optimizer_state(), before)
    job.optimizer.offload_to_cpu()
    job.optimizer.restore_from_cpu()
    job.optimizer.load_state_dict(saved)
    assert_equal(job.optimizer_state(), wanted)
    job.optimizer.offload_to_cpu()
    job.optimizer.restore_from_cpu()
    state.offloader.residency.require(Target.OPTIMIZER_STATE)
    assert_equal(job.optimizer_state(), wanted)


def job_with_legacy_format():
    """Returns a job after a step, whose parameter state megatron-core can save and load in its legacy format."""
    job = tiny_megatron()
    job.step(0)
    for part in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        part.data_parallel_group_gloo = part.data_parallel_group
        for state in part.optimizer.state.values():
            if "step" in state:  # torch's Adam has a tensor there, which megatron-core does not save but requires
                state["step"] = float(state["step"])
    return job


def parameter_state(path):
    """Returns the tensors that are saved, by bucket and name."""
    buckets = {name: one for name, one in torch.load(path, weights_only=False).items() if isinstance(name, int)}
    named = [(f"{bucket} {dtype}", part) for bucket, parts in buckets.items() for dtype, part in parts.items()]
    return {f"{place} {name}": one for place, part in named for name, one in part.items() if torch.is_tensor(one)}


def test_legacy_parameter_state_is_whole_right_behind_the_start_of_the_return(adopted, monkeypatch, tmp_path):
    job, first, again = job_with_legacy_format(), str(tmp_path / "first.pt"), str(tmp_path / "again.pt")
    adopted(job)
    job.optimizer.save_parameter_state(first)
    assert len(parameter_state(first)) == 3
    delay_moves(monkeypatch, seconds=0.05)
    job.optimizer.offload_to_cpu()
    for call in (job.optimizer.save_parameter_state, job.optimizer.load_parameter_state):
        with pytest.raises(ResidencyError, match=AWAY):
            call(first)
    job.optimizer.restore_from_cpu()
    job.optimizer.save_parameter_state(again)
    assert_equal(parameter_state(again), parameter_state(first))
    with torch.no_grad():
        for _, tensor in state_tensors(job.optimizer, next(job.model.parameters()).device):
            tensor.zero_()
    job.optimizer.offload_to_cpu()
    job.optimizer.restore_from_cpu()
    job.optimizer.load_parameter_state(first)
    job.optimizer.save_parameter_state(again)
    assert_equal(parameter_state(again), parameter_state(first))


def test_masters_are_made_of_parameters_only_when_they_have_come(adopted, monkeypatch):
    def with_new_parameters():
        job = tiny_megatron()
        job.step(0)
        with torch.no_grad():
            next(job.model.parameters()).add_(1)
        return job

    plain = with_new_parameters()
    plain.optimizer.reload_model_params()
    job = with_new_parameters()
    adopted(job)
    delay_moves(monkeypatch, seconds=0.05)
    job.optimizer.offload_to_cpu()
    with pytest.raises(ResidencyError, match=AWAY):
        job.optimizer.reload_model_params()
    job.optimizer.restore_from_cpu()
    job.optimizer.reload_model_params()
    assert_equal(job.optimizer_state(), plain.optimizer_state())


def test_gradients_alone_come_back_zeroed(adopted):
    job = tiny_megatron()
    state = adopted(job)
    job.forward_backward(0)
    grads = job.model.buffers[0].grad_data
    address = grads.data_ptr()
    assert grads.any()
    job.model.offload_grad_buffers(synchronize=False, empty_cache=False)
    assert state.offloader.residency.where(Target.OPTIMIZER_STATE) is Placement.GPU
    job.model.restore_grad_buffers(synchronize=False)
    assert not grads.any()
    assert job.model.buffers[0].grad_data.data_ptr() == address
    parts = [job.optimizer, *getattr(job.optimizer, "chained_optimizers", [])]
    assert all("reload_model_params" in vars(part) for part in parts)
    state.close()  # guards nothing any more
    assert not any("reload_model_params" in vars(part) for part in parts)
    forward_only = adopt_own_methods([tiny_megatron(forward_only=True).model], None, PinnedArena())
    forward_only.move_params("cpu")
    assert forward_only.offloader.mapped_bytes == 0
    forward_only.close()
