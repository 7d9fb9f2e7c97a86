"""Tests an offloader's edges: replaced state, unknown views, failed moves and prefetches, impossible tables."""

import copy
import dataclasses
import gc
import threading

import pytest
import torch
from support.jobs import CPU, assert_equal, enter_and_require, make_job, run_steps, visit
from support.phases import delay_moves
from support.ranges import CHUNK_BYTES, Trouble, small_chunks
from torch import nn

from nemo_offload_rl.memory.gpu_range import HostRange, TorchRange
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.attach import attach
from nemo_offload_rl.residency.metrics import MemoryNow, Meter
from nemo_offload_rl.residency.optimizer_state import state_tensors
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Placement, Target
from nemo_offload_rl.residency.target import ResidencyError
from nemo_offload_rl.residency.transfer import ChunkError

pytestmark = pytest.mark.usefixtures("no_leak")


def test_loaded_state_in_one_storage_gets_slots_of_its_own(stepped):
    """copy.deepcopy, like torch.load, copies a shared storage as one: here state that was saved while in a range."""
    job, offloader = stepped(num_steps=2)
    offloader.load_all_to_gpu()
    nbytes = offloader.targets[Target.OPTIMIZER_STATE].nbytes
    job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    offloader.residency.enter(Phase.GENERATE)
    assert offloader.targets[Target.OPTIMIZER_STATE].nbytes == nbytes


def test_ranges_whose_addresses_change_work_alike(offloaders):
    """Moves as with a driver without virtual memory management; the optimizer steps the parameters themselves."""
    plain = run_steps(make_job(), 3)
    job = make_job()
    offloader = offloaders(job, ranges=lambda nbytes, device, _: TorchRange(nbytes, device))
    assert run_steps(job, 3, offloader) == plain
    offloader.residency.require(Target.OPTIMIZER_STATE)
    wanted = job.everything()
    offloader.residency.enter(Phase.GENERATE)
    read = offloader.checkpoint_reader()
    tensors = dict(state_tensors(job.optimizer, CPU)) | job.model.state_dict(keep_vars=True)
    assert_equal({name: read(tensor) for name, tensor in tensors.items()}, wanted)
    params = offloader.targets[Target.PARAMS].flat_buffer
    assert params.holds(job.model[0].weight)
    assert not params.holds(job.optimizer.state[job.model[0].weight]["exp_avg"])
    assert not params.holds(torch.empty(0))


def test_moments_in_fewer_bits_come_back_before_they_are_saved(stepped):
    """megatron-core computes fp32 moments where the state is supposed to be: on the GPU."""
    job, offloader = stepped(Phase.GENERATE)
    assert not offloader.targets[Target.OPTIMIZER_STATE].needs_gpu_to_save
    state = next(iter(job.optimizer.state.values()))
    state["exp_avg_sq"] = state["exp_avg_sq"].half()
    offloader.checkpoint_reader()
    assert offloader.residency.where(Target.OPTIMIZER_STATE) is Placement.GPU


def test_reference_weights_are_not_swapped_into_params_that_are_away(stepped):
    job, offloader = stepped(with_reference=True)
    want = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    offloader.residency.enter(Phase.GENERATE)
    with pytest.raises(ResidencyError, match="params is needed on the GPU"), offloader.reference.swapped_in():
        pass
    offloader.residency.enter(Phase.LOGPROB)
    assert_equal(job.model.state_dict(), want)
    refused = pytest.raises(ResidencyError, match="cannot move to host while the reference weights are swapped in")
    with offloader.reference.swapped_in(), refused:
        offloader.residency.enter(Phase.GENERATE)
    assert_equal(job.model.state_dict(), want)


def test_a_buffer_that_changes_its_memory_is_housed_anew_and_has_no_reference(offloaders):
    """A router's expert bias changes so, because megatron-core converts it back to fp32 in a forward pass."""
    job = make_job()
    job.model.register_buffer("expert_bias", torch.ones(100, dtype=torch.bfloat16))
    offloader = offloaders(job, with_reference=True)
    job.model.expert_bias.data = job.model.expert_bias.data.float() * 3
    with pytest.raises(ResidencyError, match=r"0\..*expert_bias and 0 others .* no reference"):
        offloader.reference.swapped_in().__enter__()
    before = offloader.mapped_bytes
    offloader.residency.enter(Phase.GENERATE)
    assert offloader.targets[Target.PARAMS].nbytes + offloader.targets[Target.OPTIMIZER_STATE].nbytes > before
    offloader.residency.enter(Phase.TRAIN)
    assert job.model.expert_bias.eq(3).all()
    assert not offloader.targets[Target.PARAMS].strays()
    with pytest.raises(ResidencyError, match=r"0\..*expert_bias and 0 others .* no reference"):
        offloader.reference.swapped_in().__enter__()


def test_a_buffer_that_something_unknown_uses_stays(offloaders):
    job = make_job()
    job.model.register_buffer("scale", torch.ones(100))
    offloader = offloaders(job)
    job.model.scale.data = torch.full((100,), 3.0)
    inputs, bias = torch.ones(2, 10, requires_grad=True), torch.ones(10)
    product = nn.functional.linear(inputs, job.model.scale.view(10, 10), bias)  # keeps a view that only it knows
    offloader.residency.enter(Phase.GENERATE)
    assert job.model.scale.eq(3).all()
    assert [name for name, _ in offloader.targets[Target.PARAMS].strays()] == ["0..scale"]
    product.sum().backward()


@pytest.mark.parametrize("kind", ["buffer", "state"])
def test_what_is_made_anew_with_another_size_takes_no_more_memory_each_time(stepped, kind):
    """A rotary table grows so with the longest sequence."""
    job, offloader = stepped()
    taken = []
    for cycle in range(5):
        made = torch.full((100_000 + 10 * cycle,), float(cycle))
        if kind == "buffer":
            job.model.register_buffer("cos", made)
        else:
            job.optimizer.state[job.model[0].weight]["extra"] = made
        offloader.residency.enter(Phase.GENERATE)
        enter_and_require(offloader)
        held = offloader.context.arena.allocated_bytes, offloader.mapped_bytes  # with all state on the GPU
        taken.append([round(nbytes / 1e4) for nbytes in held])
        assert made.eq(cycle).all()
    assert taken[2:] == [taken[1]] * 3


def test_a_tensor_that_a_new_buffer_replaces_keeps_its_contents_while_it_is_used(offloaders):
    job = make_job()
    layer = job.model[0]
    layer.register_buffer("freq", torch.ones(10))
    layer.original = layer.freq  # as transformers' rotary embeddings with dynamic scaling
    offloader = offloaders(job)
    sizes = []
    for number in (2.0, 3.0, 4.0):
        layer.register_buffer("freq", torch.full((10,), number))
        visit(offloader, Phase.GENERATE, Phase.TRAIN)
        assert layer.original.tolist() == [1.0] * 10
        assert layer.freq.tolist() == [number] * 10
        sizes.append(offloader.targets[Target.PARAMS].nbytes)
    assert len(set(sizes)) == 1  # the second and third take the first one's place


def test_a_range_that_something_still_views_stays_as_it_is(stepped):
    job, offloader = stepped(num_steps=0)
    job.model.register_buffer("cos", torch.ones(100))
    run_steps(job, 1, offloader)
    old = job.model.cos
    for size in (200, 300):
        job.model.cos = torch.zeros(size)
        run_steps(job, 1, offloader)
    assert old.eq(1).all()
    assert offloader.targets[Target.PARAMS].flat_buffer.holds(old)


def test_a_reader_keeps_the_host_memory_of_a_range_that_is_dropped(stepped):
    job, offloader = stepped(num_steps=0)
    job.model.register_buffer("cos", torch.ones(100))
    offloader.residency.enter(Phase.GENERATE)
    view = offloader.checkpoint_reader()(job.model.cos)
    for size in (200, 300):
        offloader.residency.enter(Phase.TRAIN)
        job.model.cos = torch.zeros(size)
        offloader.residency.enter(Phase.GENERATE)
    assert view.eq(1).all()
    offloader.residency.enter(Phase.TRAIN)


def test_what_is_housed_beside_a_move_waits_for_it_and_is_refused_while_state_is_away(stepped, monkeypatch):
    job, offloader = stepped(num_steps=2)
    offloader.load_all_to_gpu()
    wanted = job.everything()
    name = next(key for key in wanted if key.startswith("exp_avg["))
    for state in job.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()
    job.model[1].running_mean.data = job.model[1].running_mean.data.clone()
    offloader.residency.enter(Phase.GENERATE)
    for state in job.optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 2.0)
    with pytest.raises(ResidencyError, match="is needed on the GPU"):
        offloader.adopt_new_tensors()
    delay_moves(monkeypatch, seconds=0.02)
    offloader.residency.enter(Phase.TRAIN)
    offloader.adopt_new_tensors()
    found = job.everything()
    assert found[name].eq(2).all()
    moments = [key for key in wanted if key.startswith("exp_avg[")]
    assert_equal(*({key: one[key] for key in wanted if key not in moments} for one in (found, wanted)))


def test_objects_that_the_garbage_collector_has_frozen_are_found(offloaders):
    """vLLM calls gc.freeze."""
    plain, job = make_job(), make_job()
    job.model.register_buffer("freq", torch.ones(10))
    job.model.original = job.model.freq
    before = make_job()
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    offloader = offloaders(make_job())
    assert gc.get_freeze_count() > 0.9 * num_frozen  # only if views are missing
    offloader.close()
    del before
    offloader = offloaders(job)
    losses = run_steps(job, 2, offloader)
    job.model.register_buffer("freq", torch.full((10,), 2.0))
    gc.freeze()
    losses += [job.step(2)]
    offloader.residency.enter(Phase.GENERATE)
    enter_and_require(offloader)
    assert losses == run_steps(plain, 3)
    assert job.model.original.eq(1).all()
    assert job.model.freq.eq(2).all()


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_prefetch_that_failed_is_no_measurement_and_no_error_where_it_is_not_needed(stepped, is_needed):
    """The latter as after a step that was skipped because its loss was not finite."""
    trouble = Trouble()
    _, offloader = stepped(Phase.GENERATE, Phase.LOGPROB, ranges=trouble)
    offloader.meter.take_metrics()
    trouble.chunks_left = 0
    if is_needed:
        offloader.residency.prefetch(Phase.TRAIN)
        with pytest.raises(ChunkError):
            offloader.residency._last[Target.OPTIMIZER_STATE].move.wait()
        assert "train/optimizer_state/gb" not in offloader.meter.take_metrics()
    else:
        visit(offloader, Phase.TRAIN, Phase.REFIT)
        assert offloader.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST
    trouble.chunks_left = None
    enter_and_require(offloader)


def test_a_table_that_cannot_be_takes_no_memory():
    job, arena = make_job(), PinnedArena()
    table = {phase: dict(placements) for phase, placements in DEFAULT_TABLE.items()}
    table[Phase.LOGPROB][Target.PARAMS] = Placement.DROPPED
    with pytest.raises(ValueError, match="params does not support placement dropped in phase logprob"):
        attach([job.model], job.optimizer, arena, table=table, ranges=small_chunks)
    arena.close()  # raises if anything is left behind


def test_tensors_without_memory_of_their_own_may_be_about(stepped):
    held = [nn.LazyLinear(3), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)]
    stepped()
    assert len(held) == 2


RESERVE_BYTES = 1 << 20


class Gated(HostRange):
    """Implements a range that is mapped once the gate is open."""

    gate = threading.Event()

    def map(self, index: int) -> None:
        self.gate.wait()
        super().map(index)


@pytest.mark.parametrize(("missing_bytes", "comes"), [(0, True), (1, False)])
@pytest.mark.parametrize("at_once", [False, True])
def test_memory_that_an_earlier_prefetch_will_map_is_not_free(stepped, monkeypatch, missing_bytes, comes, at_once):
    Gated.gate.set()
    job, offloader = stepped(ranges=lambda nbytes, device, chunk_bytes: Gated(nbytes, CHUNK_BYTES))
    offloader.residency.require(Target.OPTIMIZER_STATE)
    wanted = job.everything()
    gpu_bytes = sum(offloader.nbytes().values()) + RESERVE_BYTES - missing_bytes
    memory = Meter.memory

    def memory_now(meter: Meter) -> MemoryNow:
        return dataclasses.replace(memory(meter), gpu_free=gpu_bytes - offloader.mapped_bytes)

    monkeypatch.setattr(Meter, "memory", memory_now)
    offloader.residency.enter(Phase.GENERATE)
    Gated.gate.clear()
    if not at_once:
        offloader.residency.prefetch(Phase.LOGPROB)  # the parameters, of which nothing is mapped yet
    offloader.residency.prefetch(Phase.TRAIN, reserve_bytes=RESERVE_BYTES)
    found = offloader.residency.where(Target.OPTIMIZER_STATE)
    assert offloader.residency.where(Target.PARAMS) is Placement.GPU
    Gated.gate.set()
    offloader.residency.enter(Phase.LOGPROB)
    assert found is (Placement.GPU if comes else Placement.HOST)
    enter_and_require(offloader)
    assert_equal(job.everything(), wanted)


@pytest.mark.parametrize(("chunks_left", "place"), [(0, Placement.HOST), (None, Placement.GPU)])
def test_a_checkpoint_after_a_prefetch_reads_the_gpu_or_the_host_if_memory_was_missing(stepped, chunks_left, place):
    trouble = Trouble()
    job, offloader = stepped(ranges=trouble)
    offloader.residency.require(Target.OPTIMIZER_STATE)
    moment = job.optimizer.state[job.model[0].weight]["exp_avg"]
    wanted = moment.clone()
    visit(offloader, Phase.GENERATE, Phase.LOGPROB)
    trouble.chunks_left = chunks_left
    offloader.residency.prefetch(Phase.TRAIN)
    read = offloader.checkpoint_reader()
    assert offloader.residency.where(Target.OPTIMIZER_STATE) is place
    assert torch.equal(read(moment), wanted)
    assert (read(moment) is moment) == (place is Placement.GPU)
    trouble.chunks_left = None
    enter_and_require(offloader)
    assert torch.equal(moment, wanted)
