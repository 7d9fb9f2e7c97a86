"""Tests that a checkpoint written beside the run holds the state of its step, whatever happens meanwhile."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from support.gpu import NEEDS_TE, gpu_policy
from support.late_streams import LateStream
from support.limits import files_of_at_most
from support.phases import assert_ends, delay_moves
from support.ranks import run_ranks, worker_of_rank
from support.tiny import random_batch, tiny_policy

from nemo_offload_rl.mcore.checkpoint import background_save, checkpoint_writer
from nemo_offload_rl.mcore.checkpoint.checkpoint_writer import HashingSaveStrategy
from nemo_offload_rl.memory.pinned import HostMemoryError, PinnedArena
from nemo_offload_rl.memory.streams import CopyStream
from nemo_offload_rl.residency.streamed import window
from nemo_offload_rl.residency.table import Phase, Placement, Target
from nemo_offload_rl.storage.disk import DiskFullError
from nemo_offload_rl.storage.manifest import read_manifest, write_manifest
from tests.unit.mcore.test_checkpoint import CONSTANT, logprobs, train
from tests.unit.mcore.test_checkpoint_hyperparameters import policy_of
from tests.unit.mcore.test_residency import GENERATION


@pytest.fixture
def gate(monkeypatch):
    """Blocks every tensor write until it is set."""
    gate = threading.Event()
    stream = HashingSaveStrategy.transform_save_stream

    def held_back(self, write_item, raw):
        assert gate.wait(60)
        return stream(self, write_item, raw)

    monkeypatch.setattr(HashingSaveStrategy, "transform_save_stream", held_back)
    yield gate
    gate.set()


def start(worker, folder):
    worker.start_checkpoint(str(folder), save_optimizer=True)


def trained(make_worker, policy=None, **options):
    worker = make_worker(policy, **options)
    train(worker, [0])
    return worker, logprobs(worker)


def assert_holds(worker, folder, want, *after):
    worker.finish_checkpoint()
    worker.load_checkpoint(str(folder))
    assert torch.equal(logprobs(worker), want)
    for reports in after:
        assert train(worker, AFTER) == reports


AFTER = [1, 2]
"""Seeds of steps behind a checkpoint: what the second one reports depends on optimizer state, too."""
NUM_STEPS = 3  # the second checkpoint is the first to reuse a plan, the third reuses it again


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_checkpoint_has_the_state_of_its_own_step(make_worker, tmp_path, gate, precision):
    """NeMo-RL #3312: with reused plans, all checkpoints after the first had the weights of the first."""
    worker, want = make_worker(tiny_policy(precision=precision, **CONSTANT)), []
    for step in range(NUM_STEPS):
        folder = tmp_path / f"step_{step}"
        gate.clear()
        train(worker, [step])
        want.append(logprobs(worker))
        start(worker, folder)
        assert not worker.is_checkpoint_written()
        # Nothing is written yet, and weights and state change; phases that move neither continue.
        worker.prepare_for_training()
        threading.Timer(0.2, gate.set).start()
        after_it = train(worker, AFTER)
        write_manifest(folder, worker.finish_checkpoint())
        assert worker.find_damage(str(folder), read_manifest(folder)) == []
        worker.load_checkpoint(str(folder))  # back to the saved step
        assert torch.equal(logprobs(worker), want[step])
        assert train(worker, AFTER) == after_it
        worker.load_checkpoint(str(folder))
    fresh = make_worker(tiny_policy(precision=precision), seed=99)
    for step in range(NUM_STEPS):
        fresh.load_checkpoint(str(tmp_path / f"step_{step}"))
        assert torch.equal(logprobs(fresh), want[step])


GPU = pytest.param(lambda: gpu_policy(""), id="gpu", marks=NEEDS_TE)
on_both = pytest.mark.parametrize("make_policy", [pytest.param(tiny_policy, id="cpu"), GPU])


def with_state(policy, kind):
    """Returns a policy whose optimizer state moves to the host for a refit (`leaves`), or stays (`resident`)."""
    policy["offload_optimizer_for_refit"] = "leaves" in kind
    if "resident" in kind:
        policy["residency"]["table"] = {"generate": {"params": "keep"}}
    policy["megatron_cfg"]["optimizer"]["use_distributed_optimizer"] = "replicated" not in kind
    return policy


def late_copies(monkeypatch, snapshot_s, state_s):
    copy_all = background_save.copy_all

    def late(stream, pairs, ready):
        if stream.stream is None:
            time.sleep(snapshot_s)
        else:
            with torch.cuda.stream(stream.stream):
                torch.cuda._sleep(int(snapshot_s * 1.5e9))  # cycles
        copy_all(stream, pairs, ready)

    monkeypatch.setattr(background_save, "copy_all", late)
    if torch.cuda.is_available():
        delay_moves(monkeypatch, state_s)
        return
    move = CopyStream.copy_all

    def late_move(self, pairs):
        time.sleep(state_s)
        move(self, pairs)

    monkeypatch.setattr(CopyStream, "copy_all", late_move)


# megatron-core reads replicated state while it plans, so that state is waited for first.
KINDS = ["resident", "leaves", "leaves replicated"]


@on_both
@pytest.mark.parametrize("late_s", [(0.5, 0.0), (0.0, 0.5)], ids=["snapshot", "state"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_once_all_late_copies_are_made(make_worker, make_policy, tmp_path, monkeypatch, kind, late_s):
    worker = make_worker(with_state(make_policy(), kind))
    late_copies(monkeypatch, *late_s)
    train(worker, [0])
    want = logprobs(worker)
    start(worker, tmp_path)
    assert_holds(worker, tmp_path, want, train(worker, AFTER))


@pytest.mark.parametrize("way", ["streamed", 0.5, 1.0])
def test_state_that_a_step_changes_on_the_host_is_written_as_it_was(make_worker, tmp_path, monkeypatch, gate, way):
    """With streamed state the next step waits for the files; what the CPU optimizer has (a share) is copied before."""
    monkeypatch.setattr(window, "CopyStream", LateStream)
    (worker, want), later = trained(make_worker, policy_of(way)), []
    late_copies(monkeypatch, 0.2, 0.0)
    start(worker, tmp_path)
    if way == "streamed":
        worker.offload_before_refit()  # the phases before the step do not wait
        worker.offload_after_refit()
        logprobs(worker)
    training = threading.Thread(target=lambda: later.extend([*train(worker, AFTER), logprobs(worker)]))
    training.start()
    training.join(0.5 if way == "streamed" else 60)
    assert training.is_alive() == (way == "streamed")
    assert not worker.is_checkpoint_written()
    gate.set()
    training.join(60)
    assert_holds(worker, tmp_path, want, later[:-1])
    assert torch.equal(logprobs(worker), later[-1])


@pytest.mark.parametrize("when", ["planned", "finished"])
def test_a_full_disk_is_said_and_leaves_nothing_under_way(make_worker, tmp_path, monkeypatch, when):
    worker, want = trained(make_worker, with_state(tiny_policy(), "resident"))
    late_copies(monkeypatch, 0.3, 0.0)
    with monkeypatch.context() as full, files_of_at_most(100_000):
        if when == "planned":
            full.setattr(checkpoint_writer, "free_bytes", lambda folder: 1000)
        else:
            start(worker, tmp_path / "full")
        with pytest.raises(DiskFullError, match=None if when == "planned" else "File too large"):
            start(worker, tmp_path / "full") if when == "planned" else worker.finish_checkpoint()
    start(worker, tmp_path / "policy")
    train(worker, [1])
    assert_holds(worker, tmp_path / "policy", want)
    assert_ends(worker)


def test_state_leaves_behind_a_step_again_once_the_checkpoint_is_finished(make_worker, tmp_path):
    worker, _ = trained(make_worker, with_state(tiny_policy(), "leaves") | {"generation": GENERATION})
    start(worker, tmp_path)
    train(worker, [1])
    assert worker.residency.where(Target.OPTIMIZER_STATE) is Placement.GPU  # the save may still read its host memory
    worker.finish_checkpoint()
    train(worker, [2])
    assert worker.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST


def test_the_garbage_collector_stays_as_it_is_while_files_are_written(make_worker, tmp_path, gate):
    worker, _ = trained(make_worker)
    assert gc.isenabled()
    start(worker, tmp_path)
    assert not worker.is_checkpoint_written()
    assert gc.isenabled()
    gc.disable()  # as during the capture of a graph
    try:
        gate.set()
        worker.finish_checkpoint()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic_kernels")
@NEEDS_TE[1]
@pytest.mark.parametrize("kind", ["resident", "leaves", "leaves early", "leaves precision_aware"])
def test_every_checkpoint_has_the_state_of_its_own_step_behind_late_copies(make_worker, tmp_path, monkeypatch, kind):
    policy = with_state(gpu_policy(kind, **CONSTANT), kind)
    if "early" in kind:
        policy["generation"] = GENERATION
    worker = make_worker(policy)
    late_copies(monkeypatch, 0.1, 0.1)
    for step in range(NUM_STEPS):
        folder = tmp_path / f"step_{step}"
        train(worker, [step])
        want = logprobs(worker)
        start(worker, folder)
        assert_holds(worker, folder, want, train(worker, AFTER))
        worker.load_checkpoint(str(folder))


def test_state_that_is_read_on_the_host_is_not_written_over(make_worker, tmp_path, gate):
    worker, want = trained(make_worker)
    start(worker, tmp_path)
    later = train(worker, AFTER)  # state comes back and changes; its host memory is only read
    assert not worker.is_checkpoint_written()
    left = threading.Thread(target=worker.offload_before_refit)
    left.start()  # copies state to that host memory again
    left.join(0.3)
    assert left.is_alive() and not worker.is_checkpoint_written()
    gate.set()
    left.join(60)
    assert not left.is_alive() and worker.is_checkpoint_written()
    assert_holds(worker, tmp_path, want, later)


def test_optimizer_state_is_read_from_its_own_host_memory_and_all_else_is_copied_once(make_worker, tmp_path):
    worker, _ = trained(make_worker)
    arena = worker.offloader.context.arena
    before, taken = arena.allocated_bytes, []
    for step in (1, 2):
        start(worker, tmp_path / str(step))
        worker.finish_checkpoint()
        taken.append(arena.allocated_bytes - before)
        train(worker, [step])
    params = sum(parameter.nbytes for parameter in worker.state.model[0].parameters())
    assert 2 * params <= taken[0] < 2.5 * params  # weights of model and optimizer; Adam's state would be as much again
    assert taken[1] == taken[0]  # kept for the next checkpoint
    assert_ends(worker)


def test_a_checkpoint_in_the_phase_of_generation(make_worker, tmp_path, gate):
    """Saves as after a validation: weights are on the host, where a log-prob pass of the reference also writes."""
    worker, want = trained(make_worker, init_reference_model=True)
    worker.offload_after_refit()
    assert worker.residency.phase is Phase.GENERATE
    start(worker, tmp_path)
    worker.get_reference_policy_logprobs(random_batch(3), mbs=3)
    later = train(worker, AFTER)
    gate.set()
    assert_holds(worker, tmp_path, want, later)


def test_without_room_on_the_host_it_is_written_at_once(make_worker, tmp_path, monkeypatch, caplog):
    worker, want = trained(make_worker)
    allocate = PinnedArena.allocate

    def full(self, owner, nbytes, **options):
        if owner == "checkpoints":
            raise HostMemoryError("the host is full")
        return allocate(self, owner, nbytes, **options)

    monkeypatch.setattr(PinnedArena, "allocate", full)
    start(worker, tmp_path)
    assert worker.is_checkpoint_written()
    assert "is written before training continues, not in the background: the host is full" in caplog.text
    train(worker, [1])
    assert_holds(worker, tmp_path, want)


def test_what_fails_in_the_thread_is_raised_when_it_is_finished(make_worker, tmp_path, monkeypatch):
    worker, _ = trained(make_worker)
    monkeypatch.setattr(background_save, "write_hf_config", lambda: None)
    start(worker, tmp_path)
    train(worker, [1])
    with pytest.raises(TypeError, match="positional argument"):
        worker.finish_checkpoint()


def test_a_worker_that_ends_waits_for_its_writer(make_worker, tmp_path, gate):
    worker, _ = trained(make_worker)
    start(worker, tmp_path)
    threading.Timer(0.2, gate.set).start()
    assert_ends(worker)
    assert not (tmp_path / "layout.json").exists()  # it is not a checkpoint


def save_beside_training(rank, world_size, ports):
    root = Path(os.environ["SAVE_BELOW"])
    worker = worker_of_rank(tiny_policy(tensor_model_parallel_size=2, **CONSTANT), rank, world_size, ports[0])
    for step in range(3):
        folder = root / f"step_{step}"
        train(worker, [step])
        want = logprobs(worker)
        start(worker, folder)
        later = train(worker, [step + 1])
        files = worker.finish_checkpoint()
        assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json", "layout.json"} <= files.keys()
        worker.load_checkpoint(str(folder))
        assert torch.equal(logprobs(worker), want)
        assert train(worker, [step + 1]) == later
        worker.load_checkpoint(str(folder))
    worker.shutdown()


def test_two_ranks_save_beside_training(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_BELOW", str(tmp_path))
    run_ranks(save_beside_training, 2, num_ports=1)
