"""Tests the whole offloader on plain torch models and optimizers, between two places of host memory."""

import contextlib
import copy
import dataclasses
import itertools
import re
import time
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.jobs import CPU, WIDTH, adamw, amsgrad, assert_equal, enter_and_require, make_job, run_steps, sgd
from support.phases import delay_moves
from support.ranges import Trouble, small_chunks

from nemo_offload_rl.memory.gpu_range import make_range
from nemo_offload_rl.memory.pinned import HostMemoryError, PinnedArena
from nemo_offload_rl.residency.attach import attach, needed_host_bytes
from nemo_offload_rl.residency.context import Options
from nemo_offload_rl.residency.flat_buffer import BufferEntry, CorruptedTransferError, FlatBuffer, FlatBufferTarget
from nemo_offload_rl.residency.metrics import Meter
from nemo_offload_rl.residency.optimizer_state import state_tensors
from nemo_offload_rl.residency.residency import Residency
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Placement, Target
from nemo_offload_rl.residency.target import ResidencyError
from nemo_offload_rl.residency.transfer import Mover

pytestmark = pytest.mark.usefixtures("no_leak")


def num_chunks(offloader, target):
    return sum(len(backed.range.chunks) for backed in offloader.targets[target].flat_buffer.backed_ranges)


def assert_same(offloader, job, plain):
    offloader.residency.require(Target.OPTIMIZER_STATE)
    assert_equal(job.everything(), plain.everything())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16_with_masters"])
@pytest.mark.parametrize("make_optimizer", [adamw, sgd, amsgrad])
def test_training_with_all_phases_between_is_bit_equal_to_training_without(offloaders, make_optimizer, dtype):
    plain = make_job(make_optimizer, dtype)
    wanted = run_steps(plain, 20)
    job = make_job(make_optimizer, dtype)
    offloader = offloaders(job, verify=True)
    assert run_steps(job, 20, offloader) == wanted
    assert_same(offloader, job, plain)
    assert wanted[-1] < wanted[0]


def test_what_a_target_has_left_is_given_back_before_the_next_one_moves(offloaders, monkeypatch):
    calls, add = [], FlatBuffer.add
    monkeypatch.setattr(Meter, "give_back_cache", lambda _: calls.append("give back"))
    monkeypatch.setattr(FlatBuffer, "add", lambda self, entries: (calls.append("move"), add(self, entries))[1])
    offloaders(make_job())
    kinds = [kind for kind, _ in itertools.groupby(calls)]
    assert calls.count("move") > 1
    assert kinds.count("move") == calls.count("move")
    assert calls[-1] == "give back"


def test_objects_and_addresses_stay(stepped):
    job, offloader = stepped(num_steps=0)
    parameters = {name: place for name, place in job.places().items() if name in dict(job.model.named_parameters())}
    run_steps(job, 1, offloader)  # the step created its moments, which moved into a range when they were offloaded
    places = job.places()
    assert parameters.items() <= places.items()
    run_steps(job, 3, offloader)
    assert job.places() == places


def test_a_step_that_follows_late_arrivals_waits_for_them_and_a_missing_wait_would_show(offloaders):
    plain, job, trouble = make_job(), make_job(), Trouble()
    offloader = offloaders(job, ranges=trouble)
    trouble.delay_s = 0.02
    assert run_steps(job, 4, offloader) == run_steps(plain, 4)
    assert_same(offloader, job, plain)
    for remove in offloader.hooks:  # the hooks require the state before it is used: without them the delay shows
        remove()
    trouble.delay_s = 0.1
    run_steps(job, 2, offloader)
    run_steps(plain, 2)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(offloader, job, plain)


def test_entering_train_does_not_wait_for_the_optimizer_state(stepped):
    trouble = Trouble()
    _, offloader = stepped(Phase.REFIT, ranges=trouble)
    offloader.residency.wait_until_released()
    trouble.delay_s = 0.1
    start = time.perf_counter()
    offloader.residency.enter(Phase.TRAIN)
    entered = time.perf_counter() - start
    offloader.residency.require(Target.OPTIMIZER_STATE)
    required = time.perf_counter() - start
    assert required >= num_chunks(offloader, Target.OPTIMIZER_STATE) * trouble.delay_s
    assert entered < required / 2


def test_memory_is_really_given_back_in_generate_and_the_host_side_is_as_large_as_the_state(offloaders):
    job = make_job(num_layers=16)
    offloader = offloaders(job)
    run_steps(job, 1, offloader)
    offloader.residency.require(Target.OPTIMIZER_STATE)
    nbytes = sum(flat_buffer.nbytes for flat_buffer in offloader.targets.values())
    assert nbytes > 48 * 2**20
    assert offloader.mapped_bytes == nbytes
    before = psutil.Process().memory_info().rss
    offloader.residency.enter(Phase.GENERATE)
    assert offloader.mapped_bytes == 0
    assert before - psutil.Process().memory_info().rss > 0.9 * nbytes
    moments = sum(t.nbytes for name, t in state_tensors(job.optimizer, CPU) if not name.startswith("master"))
    held = [backed.host.mapped_bytes for backed in offloader.targets[Target.OPTIMIZER_STATE].flat_buffer.backed_ranges]
    assert moments <= sum(held) <= 1.01 * moments
    enter_and_require(offloader)
    assert offloader.mapped_bytes == nbytes


@pytest.mark.parametrize("chunk", [0, 1])
def test_params_that_find_no_memory_leave_everything_where_it_was(stepped, chunk):
    trouble = Trouble()
    job, offloader = stepped(num_steps=2, ranges=trouble)
    offloader.residency.require(Target.OPTIMIZER_STATE)
    wanted = job.everything()
    offloader.residency.enter(Phase.GENERATE)
    trouble.chunks_left = chunk
    with pytest.raises(ResidencyError, match=r"^Cannot move params to the GPU for phase train: out of mem") as raised:
        offloader.residency.enter(Phase.TRAIN)
    (tensor,) = re.findall(r"out of memory for 0\.(\S+)", str(raised.value))
    assert tensor in dict(job.model.named_parameters())
    assert offloader.residency.phase is Phase.GENERATE
    assert {offloader.residency.where(target) for target in (Target.PARAMS, Target.OPTIMIZER_STATE)} == {Placement.HOST}
    assert offloader.mapped_bytes == 0
    trouble.chunks_left = None
    enter_and_require(offloader)
    assert_equal(job.everything(), wanted)


def test_optimizer_state_that_finds_no_memory_is_told_at_the_step_and_can_come_later(stepped):
    plain, trouble = make_job(), Trouble()
    run_steps(plain, 2)
    job, offloader = stepped(num_steps=2, ranges=trouble)
    offloader.residency.require(Target.OPTIMIZER_STATE)
    offloader.residency.enter(Phase.GENERATE)
    trouble.chunks_left = num_chunks(offloader, Target.PARAMS) + 1
    offloader.residency.enter(Phase.TRAIN)
    words = r"^Cannot move optimizer_state to the GPU .* memory for exp_avg(_sq)?\[0\."
    with pytest.raises(ResidencyError, match=words):
        job.step(2)
    assert offloader.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST
    assert offloader.targets[Target.OPTIMIZER_STATE].flat_buffer.mapped_bytes == 0
    job.model.load_state_dict(plain.model.state_dict())  # the failed step's forward pass changed the running means
    for parameter in job.model.parameters():
        parameter.grad = None
    trouble.chunks_left = None
    offloader.residency.enter(Phase.TRAIN)
    assert job.step(2) == plain.step(2)
    assert_equal(job.everything(), plain.everything())


def test_optimizer_state_alone_can_be_left_pageable():
    job = make_job(dtype=torch.bfloat16)
    locker = SimpleNamespace(lock=lambda address, nbytes: None, unlock=lambda address: None)
    with PinnedArena(locker=locker) as arena:
        offloader = attach([job.model], job.optimizer, arena, options=Options(pinned_optimizer_state=False))
        for name, is_pinned in ((Target.PARAMS, True), (Target.OPTIMIZER_STATE, False)):
            backed_ranges = offloader.targets[name].flat_buffer.backed_ranges
            assert {backed.host.pinned for backed in backed_ranges} == {is_pinned}
        offloader.close()


def test_optimizer_state_that_never_leaves_stays_where_it_is(offloaders):
    job = make_job(dtype=torch.bfloat16)
    stays = {phase: {**cells, Target.OPTIMIZER_STATE: Placement.GPU} for phase, cells in DEFAULT_TABLE.items()}
    places = [tensor.data_ptr() for _, tensor in state_tensors(job.optimizer, CPU)]
    offloader = offloaders(job, table=stays)
    needed = partial(needed_host_bytes, [job.model], job.optimizer, offloader.context.arena)
    assert offloader.nbytes()[Target.OPTIMIZER_STATE] > 0.9 * needed()[Target.OPTIMIZER_STATE] > 0
    assert needed(table=stays)[Target.OPTIMIZER_STATE] == 0
    offloader.residency.enter(Phase.GENERATE)
    assert [tensor.data_ptr() for _, tensor in state_tensors(job.optimizer, CPU)] == places


@pytest.mark.parametrize("lacks", ["host", "GPU"])
def test_new_state_that_finds_no_memory_to_move_through_or_to_stays_unharmed_and_moves_later(offloaders, lacks):
    def is_full(owner, nbytes, **_):
        raise HostMemoryError(f"Cannot allocate {nbytes} bytes of host memory for {owner}")

    plain, job, trouble = make_job(), make_job(), Trouble()
    offloader = offloaders(job, ranges=trouble)
    state, losses = offloader.targets[Target.OPTIMIZER_STATE], [job.step(0)]
    with pytest.MonkeyPatch.context() as full:
        if lacks == "host":
            full.setattr(offloader.context.arena, "allocate", is_full)
        else:
            trouble.chunks_left = 2  # some moments fit, and must move out again
        words = "for phase refit" if lacks == "host" else "Cannot allocate the GPU memory"
        with pytest.raises(ResidencyError, match=f"Cannot move optimizer_state off the GPU.*{words}"):
            offloader.residency.enter(Phase.REFIT)
    trouble.chunks_left = None
    assert offloader.residency.where(Target.OPTIMIZER_STATE) is Placement.GPU
    assert state.flat_buffer.nbytes == 0
    losses.append(job.step(1))
    offloader.residency.enter(Phase.GENERATE)
    assert state.flat_buffer.nbytes > 0
    offloader.residency.enter(Phase.TRAIN)
    losses.append(job.step(2))
    assert losses == run_steps(plain, 3)
    assert_same(offloader, job, plain)


@pytest.mark.parametrize("target", [Target.PARAMS, Target.OPTIMIZER_STATE])
def test_verify_finds_a_flipped_bit(stepped, target):
    _, offloader = stepped(Phase.GENERATE, verify=True)
    buffer_slice = offloader.targets[target].flat_buffer.slices[0]
    buffer_slice.backed.host.tensor[buffer_slice.offset] ^= 1
    with pytest.raises(CorruptedTransferError, match=f"checksums of {target} .*at {re.escape(buffer_slice.name)} "):
        enter_and_require(offloader)


def test_use_in_the_wrong_phase_is_an_error_in_words(stepped):
    job, offloader = stepped(Phase.GENERATE, num_steps=0)
    with pytest.raises(ResidencyError, match="params is needed on the GPU, but it is host in phase generate; enter"):
        job.step(0)
    offloader.residency.enter(Phase.REFIT)
    with pytest.raises(ResidencyError, match="optimizer_state is needed on the GPU, but it is host in phase refit"):
        job.step(0)


@pytest.mark.parametrize("of", ["model", "optimizer"])
def test_a_state_dict_of_what_is_away_is_refused_and_one_of_what_arrives_waits(stepped, monkeypatch, of):
    job, offloader = stepped()
    offloader.load_all_to_gpu()
    owner = getattr(job, of)
    saved = copy.deepcopy(owner.state_dict())
    wanted = job.everything()
    delay_moves(monkeypatch, seconds=0.05)
    offloader.residency.enter(Phase.GENERATE)
    uses = [owner.state_dict, lambda: owner.load_state_dict(copy.deepcopy(saved))]
    if of == "model":
        uses.append(job.model[0].state_dict)  # megatron-core's wrappers call that of a part
    for use in uses:
        with pytest.raises(ResidencyError, match="is needed on the GPU, but it is host in phase generate"):
            use()
    offloader.residency.place(dict.fromkeys(offloader.targets, Placement.GPU))
    owner.load_state_dict(copy.deepcopy(saved))  # a torch optimizer keeps the tensors that it is given
    offloader.residency.require(Target.OPTIMIZER_STATE)
    assert_equal(job.everything(), wanted)
    offloader.residency.enter(Phase.GENERATE)
    read = offloader.checkpoint_reader()
    found = owner.state_dict()
    if of == "optimizer":
        saved, found = saved["state"][0], found["state"][0]
    for key, value in saved.items():
        assert torch.equal(read(found[key]), value), key


def test_a_view_that_would_not_follow_is_refused():
    job, arena = make_job(), PinnedArena()
    output = job.model(torch.ones(8, WIDTH))  # its graph keeps transposed views of the weights, which Python never sees
    with pytest.raises(ValueError, match=r"0\.\d\.weight is also referenced by 1 tensors or graphs"):
        attach([job.model], job.optimizer, arena, ranges=small_chunks)
    assert output.grad_fn is not None
    arena.close()  # raises if anything is left behind


@pytest.mark.parametrize("raises", [False, True])
def test_closing_gives_everything_back_also_when_a_hook_raises(raises):
    job, arena = make_job(), PinnedArena()
    offloader = attach([job.model], job.optimizer, arena, options=Options(with_reference=True), ranges=small_chunks)
    run_steps(job, 1, offloader)
    offloader.residency.enter(Phase.GENERATE)
    assert PinnedArena.live_bytes() > 0

    def fail() -> None:
        raise KeyError("a hook of the trainer's")

    if raises:
        offloader = dataclasses.replace(offloader, hooks=[fail, *offloader.hooks, fail])
    with pytest.raises(KeyError, match="a hook of the trainer's") if raises else contextlib.nullcontext():
        offloader.close()
    assert PinnedArena.live_bytes() == arena.allocated_bytes == offloader.mapped_bytes == 0
    assert not job.model._forward_pre_hooks
    assert not job.optimizer._optimizer_step_pre_hooks


def test_what_moved_is_measured(stepped):
    job, offloader = stepped()
    offloader.residency.require(Target.OPTIMIZER_STATE)
    offloader.meter.take_metrics()
    run_steps(job, 1, offloader)
    offloader.residency.require(Target.OPTIMIZER_STATE)
    metrics, sizes = offloader.meter.take_metrics(), offloader.nbytes()
    for name in ("refit/optimizer_state", "generate/params", "logprob/params", "train/optimizer_state"):
        assert metrics[f"{name}/gb"] == sizes[Target(name.partition("/")[2])] / 1e9
        assert metrics[f"{name}/gb_per_s"] == pytest.approx(metrics[f"{name}/gb"] / metrics[f"{name}/copy_s"])
        assert metrics[f"{name}/exposed_s"] >= 0
    assert not offloader.meter.take_records()


class Late(FlatBufferTarget):
    lazy_wait = True


@pytest.mark.gpu
def test_what_leaves_again_has_arrived_before():
    device = torch.device("cuda", torch.cuda.current_device())
    arena = PinnedArena()
    mover, flat_buffer = Mover(device, arena), FlatBuffer("optimizer_state", device, arena)
    tensor = torch.arange(8_000_000, device=device)
    wanted = tensor.cpu()
    flat_buffer.add([BufferEntry("tensor", tensor.untyped_storage(), [tensor])])
    table = {phase: {Target.OPTIMIZER_STATE: DEFAULT_TABLE[phase][Target.OPTIMIZER_STATE]} for phase in Phase}
    residency = Residency({Target.OPTIMIZER_STATE: Late(flat_buffer, mover)}, table, meter=Meter(device))
    residency.enter(Phase.REFIT)
    residency.wait_until_released()
    with torch.cuda.stream(mover._back.stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second, in which copies to the GPU are busy
    residency.enter(Phase.TRAIN)
    residency.enter(Phase.REFIT)  # the prefetched state was not used
    residency.enter(Phase.TRAIN)
    residency.require(Target.OPTIMIZER_STATE)
    assert torch.equal(tensor.cpu(), wanted)
    mover.close()
    flat_buffer.close()
    arena.close()


@pytest.mark.gpu
@pytest.mark.parametrize("growing", [False, True])
def test_what_another_stream_has_made_is_not_given_away_while_it_moves_in(growing):
    """As megatron-core makes its buffers; torch would give the memory to that stream again, or unmap it."""
    device, side, nbytes = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream(), 64 << 20

    def late_range(*arguments):
        made = make_range(*arguments)
        torch.cuda._sleep(200_000_000)  # a tenth of a second, before the copy
        return made

    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{growing}")
    flat_buffer = FlatBuffer("params", device, None, ranges=late_range)
    try:
        with torch.cuda.stream(side):
            tensor = torch.ones(nbytes, dtype=torch.uint8, device=device)
        side.synchronize()
        flat_buffer.add([BufferEntry("tensor", tensor.untyped_storage(), [tensor])])
        with torch.cuda.stream(side):
            torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.empty_cache()
        assert tensor.all()
    finally:
        flat_buffer.close()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
