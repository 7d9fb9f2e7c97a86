"""Tests streamed optimizer state on plain torch models, between two places of host memory, with late copies."""

import copy

import pytest
import torch
from support.jobs import WIDTH, adamw, amsgrad, assert_equal, make_job, run_steps, sgd
from support.late_streams import LateEvent, LateStream
from support.ranges import Trouble

from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError, TorchRange
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.attach import attach, needed_host_bytes
from nemo_offload_rl.residency.flat_buffer import CorruptedTransferError
from nemo_offload_rl.residency.optimizer_state import state_tensors
from nemo_offload_rl.residency.streamed import window
from nemo_offload_rl.residency.streamed.init_state import has_no_memory
from nemo_offload_rl.residency.streamed.step import HalfUpdatedError
from nemo_offload_rl.residency.table import STREAMED_TABLE, Phase, Placement, Target
from nemo_offload_rl.residency.target import NoRoomError, ResidencyError

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("no_leak")


def assert_same(offloader, job, plain):
    with offloader.streamed_state_on_host():
        assert_equal(job.everything(), plain.everything())


@pytest.mark.parametrize("window_bytes", [4 * 100_000, 4 * 1_000_000, 64_000_000], ids=["many", "some", "one chunk"])
@pytest.mark.parametrize("make_optimizer", [adamw, amsgrad])
def test_numbers_are_those_of_resident_state(streaming, late_copies, make_optimizer, window_bytes):
    plain, job = make_job(make_optimizer), make_job(make_optimizer)
    wanted = run_steps(plain, 4)
    offloader = streaming(job, stream_window_bytes=window_bytes)
    assert run_steps(job, 2) == wanted[:2]  # consecutive steps
    assert [job.step(2)] == wanted[2:3]
    offloader.residency.enter(Phase.GENERATE)
    offloader.residency.enter(Phase.TRAIN)
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


def test_what_the_device_holds_is_the_window(streaming):
    job = make_job()
    offloader = streaming(job)
    state = offloader.targets[Target.OPTIMIZER_STATE]
    count = sum(parameter.numel() for parameter in job.model.parameters())
    assert state.host_nbytes == pytest.approx(8 * count, rel=0.01)
    again = make_job()
    needed = needed_host_bytes([again.model], again.optimizer, PinnedArena(), table=STREAMED_TABLE)
    assert needed[Target.OPTIMIZER_STATE] == state.host_nbytes
    run_steps(job, 1)
    tensors = [tensor for name, tensor in state_tensors(job.optimizer, CPU) if not name.startswith("master")]
    assert tensors
    assert all(has_no_memory(tensor) for tensor in tensors)
    assert state.mapped_bytes == state.nbytes <= 4 * 12 * 50_000
    offloader.residency.enter(Phase.GENERATE)
    assert state.mapped_bytes == 0
    assert offloader.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST
    with pytest.raises(ResidencyError, match="optimizer_state is needed on the GPU, but it is host"):
        job.optimizer.step()
    with pytest.raises(RuntimeError, match="single memory location"):
        tensors[0].copy_(torch.ones_like(tensors[0]))
    metrics = offloader.meter.take_metrics()
    assert metrics["train/optimizer_state/gb"] == pytest.approx(2 * state.host_nbytes / 1e9)
    assert "generate/optimizer_state/gb" not in metrics


def test_ranges_whose_addresses_change_work_alike(streaming):
    plain, job = make_job(), make_job()
    offloader = streaming(job, ranges=lambda nbytes, device, _: TorchRange(nbytes, device))
    assert run_steps(job, 3, offloader) == run_steps(plain, 3)


def test_no_memory_for_the_window_is_said_at_the_start_and_later(streaming):
    trouble = Trouble()
    trouble.chunks_left = 0
    with pytest.raises(OutOfGpuMemoryError, match="Cannot allocate"):
        attach([make_job().model], make_job().optimizer, PinnedArena(), table=STREAMED_TABLE, ranges=trouble)


def test_a_window_that_does_not_come_back_harms_nothing(streaming):
    plain, job, trouble = make_job(), make_job(), Trouble()
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


def test_copies_through_staging_buffers_give_the_same_numbers(streaming, monkeypatch):
    """Copies as on a GPU whose host memory could not be page-locked."""
    monkeypatch.setattr(window.HostCopies, "_is_staged", lambda self, segment: True)
    plain, job = make_job(), make_job()
    offloader = streaming(job, pinned_optimizer_state=False, verify=True)
    assert run_steps(job, 2, offloader) == run_steps(plain, 2)
    assert_same(offloader, job, plain)


class FailingStream(LateStream):
    """Fails in a later copy."""

    left, error = None, RuntimeError

    def copy_all(self, pairs):
        if FailingStream.left is not None:
            FailingStream.left -= 1
            if FailingStream.left < 0:
                raise self.error("the link is down")
        super().copy_all(pairs)


def assert_refused(job, offloader, why="half updated"):
    """Checks that everything that would use model or state is refused."""
    for use in (
        lambda: job.optimizer.step(),
        lambda: job.model(torch.zeros(2, WIDTH)),
        lambda: offloader.residency.enter(Phase.TRAIN),
        lambda: offloader.checkpoint_reader(),
        lambda: offloader.residency.enter(Phase.GENERATE),
        lambda: offloader.streamed_state_on_host().__enter__(),
    ):
        with pytest.raises(HalfUpdatedError, match=why):
            use()


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setattr(window, "CopyStream", FailingStream)
    yield FailingStream
    FailingStream.left = None


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (RuntimeError, HalfUpdatedError, r"in chunk \d+ of \d+ \(RuntimeError: the link is down\).*newest"),
        (KeyboardInterrupt, KeyboardInterrupt, "the link is down"),
    ],
)
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
def test_a_step_that_fails_before_it_has_updated_anything_can_be_made_again(
    streaming, failing, make_optimizer, num_copies
):
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
    run_steps(plain, 1)
    run_steps(job, 1)
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
    turned = make_job()
    turned.model[0].weight.data = turned.model[0].weight.data.t()
    for job, words in (
        (make_job(sgd), "the state tensors of SGD are not known before its first step; use Adam"),
        (make_job(adamw, torch.bfloat16), "neither a parameter of the model nor a master"),
        (turned, "has strides"),
    ):
        with pytest.raises(ValueError, match=words):
            attach([job.model], job.optimizer, PinnedArena(), table=STREAMED_TABLE)
