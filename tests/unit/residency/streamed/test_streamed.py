"""Tests streamed optimizer state on plain torch models, between two places of host memory, with late copies."""

import copy
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.jobs import WIDTH, Job, adamw, amsgrad, assert_equal, make_job, run_steps, sgd, visit
from support.late_streams import LateEvent, LateStream
from support.ranges import Trouble
from torch import nn

from nemo_offload_rl.mcore.optimizer.init_optimizer_state import init_optimizer_state
from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError, TorchRange
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.streams import CopyStream
from nemo_offload_rl.residency.attach import attach
from nemo_offload_rl.residency.flat_buffer import CorruptedTransferError
from nemo_offload_rl.residency.streamed import window
from nemo_offload_rl.residency.streamed.init_state import has_no_memory, placeholder
from nemo_offload_rl.residency.streamed.step import HalfUpdatedError
from nemo_offload_rl.residency.streamed.window import ALIGNMENT, MASTER, Field, FlatLayout, Piece
from nemo_offload_rl.residency.table import STREAMED_TABLE, Phase, Target
from nemo_offload_rl.residency.target import NoRoomError, ResidencyError

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("no_leak")


def assert_same(offloader, job, plain):
    with offloader.streamed_state_on_host():
        assert_equal(job.everything(), plain.everything())


def changing_addresses(nbytes, device, chunk_bytes):
    return TorchRange(nbytes, device)


KINDS = {
    "many chunks": (adamw, {"stream_window_bytes": 4 * 100_000}),
    "many chunks of amsgrad": (amsgrad, {"stream_window_bytes": 4 * 100_000}),
    "some": (amsgrad, {"stream_window_bytes": 4 * 1_000_000}),
    "one chunk": (adamw, {"stream_window_bytes": 64_000_000}),
    "ranges whose addresses change": (adamw, {"ranges": changing_addresses}),
    "staging buffers": (adamw, {"pinned_optimizer_state": False, "verify": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_resident_state(streaming, late_copies, monkeypatch, kind):
    make_optimizer, options = KINDS[kind]
    if kind == "staging buffers":  # as on a GPU whose host memory could not be page-locked
        monkeypatch.setattr(window, "CopyStream", CopyStream)
        monkeypatch.setattr(window.HostCopies, "_is_staged", lambda self, segment: True)
    plain, job = make_job(make_optimizer), make_job(make_optimizer)
    wanted = run_steps(plain, 4)
    offloader = streaming(job, **options)
    assert run_steps(job, 2) == wanted[:2]  # consecutive steps
    assert [job.step(2)] == wanted[2:3]
    visit(offloader, Phase.GENERATE, Phase.TRAIN)
    assert [job.step(3)] == wanted[3:]
    assert_same(offloader, job, plain)


@pytest.mark.parametrize("missing", ["wait_on_current_stream", "follow"])
def test_a_missing_wait_would_show(streaming, late_copies, monkeypatch, missing):
    plain, job = make_job(), make_job()
    wanted = run_steps(plain, 3)
    streaming(job)
    monkeypatch.setattr(LateEvent if missing.startswith("wait") else LateStream, missing, lambda *_: None)
    assert run_steps(job, 3) != wanted


def test_groups_keep_their_hyperparameters_and_counters(streaming, late_copies):
    def grouped(parameters):
        first, *others = parameters
        groups = [{"params": [first], "lr": 0.1, "weight_decay": 0.0}, {"params": others, "betas": (0.5, 0.6)}]
        return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.3)

    plain, job = make_job(grouped), make_job(grouped)
    offloader = streaming(job)
    schedules = [torch.optim.lr_scheduler.StepLR(one.optimizer, step_size=1, gamma=0.5) for one in (plain, job)]
    for step in range(3):
        assert job.step(step) == plain.step(step)
        for schedule in schedules:
            schedule.step()
    assert_same(offloader, job, plain)
    assert {float(state["step"]) for state in job.optimizer.state.values()} == {3.0}


def test_a_parameter_without_gradient_is_left_alone(streaming):
    plain, job = make_job(), make_job()
    for one in (plain, job):
        one.model[0].weight.requires_grad_(False)
    offloader = streaming(job)
    assert run_steps(job, 2) == run_steps(plain, 2)
    untouched = job.optimizer.state[job.model[0].weight]
    assert float(untouched["step"]) == 0
    with offloader.streamed_state_on_host():
        assert not untouched["exp_avg"].any()


def test_state_that_is_there_already_is_taken_over(streaming, late_copies):
    plain, job = make_job(), make_job()
    wanted = run_steps(plain, 4)
    assert run_steps(job, 2) == wanted[:2]
    state = job.optimizer.state[job.model[0].weight]
    moment = state["exp_avg"]
    offloader = streaming(job)
    assert state["exp_avg"] is moment
    assert has_no_memory(moment)
    assert [job.step(2), job.step(3)] == wanted[2:]
    assert_same(offloader, job, plain)


def test_no_memory_for_the_window_is_said_and_a_window_that_does_not_come_back_harms_nothing(streaming):
    plain, job, trouble = make_job(), make_job(), Trouble()
    trouble.chunks_left = 0
    with pytest.raises(OutOfGpuMemoryError, match="Cannot allocate"):
        attach([make_job().model], make_job().optimizer, PinnedArena(), table=STREAMED_TABLE, ranges=trouble)
    trouble.chunks_left = None
    offloader = streaming(job, ranges=trouble)
    wanted = run_steps(plain, 2)
    assert job.step(0) == wanted[0]
    offloader.residency.enter(Phase.REFIT)
    trouble.chunks_left = 0
    offloader.residency.enter(Phase.TRAIN)
    with pytest.raises(NoRoomError, match="out of memory for the window"):
        offloader.residency.require(Target.OPTIMIZER_STATE)
    trouble.chunks_left = None
    offloader.residency.enter(Phase.TRAIN)
    assert job.step(1) == wanted[1]


class FailingStream(LateStream):
    left, error = None, RuntimeError

    def copy_all(self, pairs):
        if FailingStream.left is not None:
            FailingStream.left -= 1
            if FailingStream.left < 0:
                raise self.error("the link is down")
        super().copy_all(pairs)


def assert_refused(job, offloader, why="half updated"):
    enter = offloader.residency.enter
    of_job = [job.optimizer.step, partial(job.model, torch.zeros(2, WIDTH))]
    phases = [partial(enter, Phase.TRAIN), partial(enter, Phase.GENERATE)]
    for use in (*of_job, *phases, offloader.checkpoint_reader, offloader.streamed_state_on_host().__enter__):
        with pytest.raises(HalfUpdatedError, match=why):
            use()


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setattr(window, "CopyStream", FailingStream)
    yield FailingStream
    FailingStream.left = None


CHUNK_ERROR = r"in chunk \d+ of \d+ \(RuntimeError: the link is down\).*newest"
ENDS = [(RuntimeError, HalfUpdatedError, CHUNK_ERROR), (KeyboardInterrupt, KeyboardInterrupt, "the link is down")]


@pytest.mark.parametrize(("error", "raised", "words"), ENDS)
def test_a_step_that_fails_in_the_middle_ends_everything(streaming, failing, monkeypatch, error, raised, words):
    job = make_job()
    offloader = streaming(job)
    job.step(0)
    monkeypatch.setattr(failing, "error", error)
    failing.left = 7
    with pytest.raises(raised, match=words):
        job.step(1)
    failing.left = None
    assert_refused(job, offloader, f"{error.__name__}.*half updated")


class Chain:
    """Holds two optimizers of a model, stepped one after the other, as in megatron-core's ChainedOptimizer."""

    between = staticmethod(lambda: None)

    def __init__(self, parameters):
        first, *others = parameters
        self.chained_optimizers = [adamw([first]), adamw(others)]

    def step(self):
        first, second = self.chained_optimizers
        first.step()
        self.between()
        second.step()


@pytest.mark.parametrize(("make_optimizer", "num_copies"), [(adamw, 2), (Chain, 0)])
def test_a_step_that_fails_before_any_update_can_be_made_again(streaming, failing, make_optimizer, num_copies):
    plain, job = make_job(make_optimizer), make_job(make_optimizer)
    offloader = streaming(job)
    wanted = run_steps(plain, 3)
    assert job.step(0) == wanted[0]
    statistics = copy.deepcopy(job.model.state_dict())
    failing.left = num_copies
    with pytest.raises(RuntimeError, match="the link is down"):
        job.step(1)
    failing.left = None
    job.model.load_state_dict(statistics)
    for parameter in job.model.parameters():
        parameter.grad = None
    assert [job.step(1), job.step(2)] == wanted[1:]
    assert_same(offloader, job, plain)


@pytest.mark.parametrize("error", ["the link is down", "no step"])
def test_an_error_before_the_second_optimizers_first_update_ends_everything(streaming, failing, error):
    def hook(*_):
        raise RuntimeError("no step")

    job = make_job(Chain)
    offloader = streaming(job)
    job.step(0)
    if error == "no step":
        job.optimizer.chained_optimizers[1].register_step_pre_hook(hook)
    else:  # behind the copies of the first optimizer, out and back
        failing.left = 2 * offloader.targets[Target.OPTIMIZER_STATE].steps[0].num_chunks
    with pytest.raises(HalfUpdatedError, match=rf"in chunk 1 of \d+ of optimizer 2 of 2 \(RuntimeError: {error}\)"):
        job.step(1)
    failing.left = None
    assert_refused(job, offloader)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_error_between_optimizers_ends_everything(streaming, late_copies, kind):
    def fail():
        raise kind

    job = make_job(Chain)
    offloader = streaming(job)
    job.step(0)
    job.optimizer.between = fail
    with pytest.raises(kind):
        job.step(1)
    job.optimizer.between = Chain.between
    assert_refused(job, offloader, "after 1 of 2 optimizers: .*half updated")


def test_a_window_that_was_filled_for_a_step_that_is_skipped_changes_nothing(streaming, late_copies):
    plain, job = make_job(), make_job()
    offloader = streaming(job)
    wanted = run_steps(plain, 3)
    for step in range(3):
        offloader.prefetch_streamed_state()  # and again, for a step that never comes
        offloader.prefetch_streamed_state()
        assert job.step(step) == wanted[step]
        offloader.prefetch_streamed_state()
    assert_same(offloader, job, plain)


def test_checksums_find_what_has_changed_on_the_host(streaming):
    job = make_job()
    offloader = streaming(job, verify=True)
    run_steps(job, 2)
    state = job.optimizer.state[job.model[0].weight]["exp_avg"]
    offloader.checkpoint_reader()(state)[3, 5] += 1
    with pytest.raises(CorruptedTransferError, match="checksums of optimizer_state differ"):
        job.step(2)


def test_state_dicts_go_in_and_out(streaming, late_copies):
    plain, resident, job = make_job(), make_job(), make_job()
    wanted = run_steps(plain, 2)
    run_steps(resident, 1)
    offloader = streaming(job)
    job.step(5)
    job.optimizer.load_state_dict(copy.deepcopy(resident.optimizer.state_dict()))
    job.model.load_state_dict(resident.model.state_dict())
    job.model[0].weight.grad = None
    assert [job.step(1)] == wanted[1:]
    read, found = offloader.checkpoint_reader(), job.optimizer.state_dict()["state"]
    with offloader.streamed_state_on_host():
        exposed = copy.deepcopy(job.optimizer.state_dict()["state"])
    for index, state in plain.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(read(found[index][key]), value), (index, key)
            assert torch.equal(exposed[index][key], value), (index, key)


def test_a_state_dict_without_values_is_refused(streaming, late_copies):
    """The optimizer's tensors are NaN while their data is on the host."""
    job = make_job()
    offloader = streaming(job)
    saved = job.model.state_dict()
    with pytest.raises(ResidencyError, match=r"optimizer_state is streamed from the host.*checkpoint_reader"):
        job.optimizer.state_dict()
    offloader.checkpoint_reader()
    job.optimizer.state_dict()
    for after in (lambda: job.step(0), lambda: offloader.residency.enter(Phase.GENERATE)):
        after()
        with pytest.raises(ResidencyError, match="optimizer_state is streamed from the host"):
            job.optimizer.state_dict()
    with pytest.raises(ResidencyError, match="params is needed on the GPU"):
        job.model.load_state_dict(saved)
    offloader.residency.enter(Phase.TRAIN)
    job.model.load_state_dict(saved)


def test_groups_of_another_optimizer_leave_hyperparameters_as_they_are(streaming, late_copies):
    """The CPU optimizer's groups, for instance, have no `amsgrad`."""
    plain, job = make_job(), make_job()
    offloader = streaming(job)
    assert run_steps(plain, 1) == run_steps(job, 1)
    with offloader.streamed_state_on_host():
        saved = copy.deepcopy(job.optimizer.state_dict())
    saved["state"] = {}
    for group in saved["param_groups"]:
        for name in group.keys() - {"params", "lr"}:
            del group[name]
        group["lr"] = 0.1
    job.optimizer.param_groups[0]["step"] = 7  # some optimizers count here
    job.optimizer.load_state_dict(saved)
    plain.optimizer.param_groups[0]["lr"] = 0.1
    assert [job.step(1), job.step(2)] == [plain.step(1), plain.step(2)]
    (found,), (wanted,) = job.optimizer.param_groups, plain.optimizer.param_groups
    assert found | {"params": None} == wanted | {"params": None}


def test_what_cannot_be_streamed_is_refused_in_words():
    turned, without_state = make_job(), make_scaled_job()
    turned.model[0].weight.data = turned.model[0].weight.data.t()
    without_state.optimizer.state[without_state.model[0].bias] = {"step": torch.zeros(())}
    for job, words in (
        (make_job(sgd), "the state tensors of SGD are not known before its first step; use Adam"),
        (make_job(adamw, torch.bfloat16), "neither a parameter of the model nor a master"),
        (turned, "has strides"),
        (without_state, rf"AdamW has no state tensors for a parameter of shape \[{WIDTH}\]"),
    ):
        with pytest.raises(ValueError, match=words):
            attach([job.model], job.optimizer, PinnedArena(), table=STREAMED_TABLE)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, data):
        return data * self.scale


def make_scaled_job() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale())
    return Job(model, adamw(model.parameters()), {})


@pytest.mark.parametrize("start", ["no state", "state of zeros", "state of a step"])
def test_parameters_without_a_dimension_have_the_numbers_of_resident_state(streaming, start):
    plain, job = make_scaled_job(), make_scaled_job()
    for one in (plain, job):
        if start == "state of zeros":
            init_optimizer_state(one.optimizer)
        elif start == "state of a step":
            one.step(5)
    offloader = streaming(job)
    assert run_steps(job, 3) == run_steps(plain, 3)
    assert_same(offloader, job, plain)
    assert job.model[1].scale.item() != pytest.approx(1.1, abs=1e-6)
    with offloader.streamed_state_on_host():
        for key, value in plain.optimizer.state[plain.model[1].scale].items():
            assert torch.equal(job.optimizer.state[job.model[1].scale][key].view(()), value), key


@pytest.mark.parametrize(("has_memory", "wanted"), [(True, 1.001), (False, 1.0)])
def test_a_master_keeps_its_bits_and_a_placeholder_gets_those_of_the_model(streaming, has_memory, wanted):
    """bf16 cannot tell 1.001 from 1."""
    job = make_scaled_job()
    shard = job.model.to(torch.bfloat16)[1].scale
    shard.data.fill_(1.001)
    master = torch.tensor(1.001) if has_memory else placeholder(shard, torch.float32)
    assert has_no_memory(master) is not has_memory
    groups = {"fp32_from_float16_groups": [[master]], "float16_groups": [[shard]]}
    job.optimizer = SimpleNamespace(optimizer=adamw([master]), **groups)
    offloader = streaming(job)
    with offloader.streamed_state_on_host():
        assert torch.equal(master, torch.tensor(wanted))


FIELDS = [Field(MASTER, torch.int16), Field("exp_avg", torch.float32), Field("exp_avg_sq", torch.float32)]  # 10 bytes


def test_a_chunk_is_the_same_stretch_of_every_array():
    layout = FlatLayout(FIELDS, [300, 1000, 256], slot_bytes=10 * 1024 + 9)
    # 300, 1000 and 256 elements take 512, 1024 and 256: 1792 in all, in chunks of 1024.
    assert layout.nbytes == 17920
    assert [(chunk.begin, chunk.end) for chunk in layout.chunks] == [(0, 1024), (1024, 1792)]
    assert layout.chunks[0].pieces == (Piece(0, 0, 300, 0), Piece(1, 0, 512, 512))
    assert layout.chunks[1].pieces == (Piece(1, 512, 1000, 0), Piece(2, 0, 256, 512))
    assert layout.in_host(1, 1024, 768) == slice(2 * 1792 + 4 * 1024, 2 * 1792 + 4 * 1792)
    assert layout.of_parameter(2, 1) == slice(6 * 1792 + 4 * 512, 6 * 1792 + 4 * 1512)
    assert layout.in_slot(2, 100, 1) == slice(6 * 1024 + 400, 6 * 1024 + 404)


@pytest.mark.parametrize("slot_bytes", [10 * ALIGNMENT, 10 * 3 * ALIGNMENT, 10 * 50 * ALIGNMENT])
def test_pieces_cover_every_element_once_and_are_cut_at_multiples_of_the_alignment(slot_bytes):
    numels = [1, 255, 256, 257, 5000, 512, 7]
    layout = FlatLayout(FIELDS, numels, slot_bytes)
    pieces = [piece for chunk in layout.chunks for piece in chunk.pieces]
    for index, numel in enumerate(numels):
        spans = [(piece.start, piece.stop) for piece in pieces if piece.index == index]
        assert spans[0][0] == 0
        assert spans[-1][1] == numel
        assert all(one[1] == other[0] and one[1] % ALIGNMENT == 0 for one, other in itertools.pairwise(spans))
    for chunk in layout.chunks:
        assert all(piece.offset % ALIGNMENT == 0 for piece in chunk.pieces)
        assert layout.in_slot(2, 0, chunk.end - chunk.begin).stop <= slot_bytes


def test_a_window_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="too small for 256 elements of 10 bytes"):
        FlatLayout(FIELDS, [1], slot_bytes=2559)
