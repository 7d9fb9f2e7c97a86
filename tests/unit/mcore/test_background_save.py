"""Checkpoints that are written beside the run hold the state of their step, whatever happens meanwhile."""

import os
import threading
from pathlib import Path

import pytest
import torch
from support.limits import files_of_at_most
from support.ranks import run_ranks, worker_of_rank
from support.tiny import random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.checkpoint.checkpoint_writer import HashingSaveStrategy
from nemo_offload_rl.memory.pinned import HostMemoryError, PinnedArena
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.storage.disk import DiskFullError
from nemo_offload_rl.storage.manifest import read_manifest, write_manifest


def train(worker, seeds):
    return [worker.train(random_batch(4, seed=seed), NLLLoss(), gbs=4, mbs=2) for seed in seeds]


def logprobs(worker):
    return worker.get_logprobs(random_batch(3), mbs=3)["logprobs"]


@pytest.fixture
def gate(monkeypatch):
    """Holds every write of a tensor back until it is set."""
    gate = threading.Event()
    stream = HashingSaveStrategy.transform_save_stream

    def held_back(self, write_item, raw):
        assert gate.wait(60)
        return stream(self, write_item, raw)

    monkeypatch.setattr(HashingSaveStrategy, "transform_save_stream", held_back)
    yield gate
    gate.set()


def constant(policy):
    policy["megatron_cfg"]["checkpoint"]["ckpt_assume_constant_structure"] = True
    return policy


NUM_STEPS = 3  # the second checkpoint is the first with a plan that is reused, the third reuses it again


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_checkpoint_has_the_state_of_its_own_step(make_worker, tmp_path, gate, precision):
    """NeMo-RL #3312: with reused plans, all checkpoints after the first had the weights of the first."""
    worker = make_worker(constant(tiny_policy(precision=precision)))
    want, after = [], []
    for step in range(NUM_STEPS):
        gate.clear()
        after.append(train(worker, [step]))
        want.append(logprobs(worker))
        worker.start_checkpoint(str(tmp_path / f"step_{step}"), save_optimizer=True)
        assert not worker.is_checkpoint_written()
        # Nothing is written yet, and weights and state change; the phases that move neither go on.
        worker.prepare_for_training()
        threading.Timer(0.2, gate.set).start()
        after_it = train(worker, [step + 1])
        files = worker.finish_checkpoint()
        write_manifest(tmp_path / f"step_{step}", files)
        assert worker.find_damage(str(tmp_path / f"step_{step}"), read_manifest(tmp_path / f"step_{step}")) == []
        worker.load_checkpoint(str(tmp_path / f"step_{step}"))  # back to the step that was saved
        assert torch.equal(logprobs(worker), want[step])
        assert train(worker, [step + 1]) == after_it
        worker.load_checkpoint(str(tmp_path / f"step_{step}"))
    fresh = make_worker(tiny_policy(precision=precision), seed=99)
    for step in range(NUM_STEPS):
        fresh.load_checkpoint(str(tmp_path / f"step_{step}"))
        assert torch.equal(logprobs(fresh), want[step])


def test_state_that_is_read_on_the_host_is_not_written_over(make_worker, tmp_path, gate):
    worker = make_worker()
    train(worker, [0])
    want = logprobs(worker)
    worker.start_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    later = train(worker, [1])  # state comes back and changes: its host memory is only read
    assert not worker.is_checkpoint_written()
    left = threading.Thread(target=worker.offload_before_refit)
    left.start()  # takes it to that host memory again
    left.join(0.3)
    assert left.is_alive() and not worker.is_checkpoint_written()
    gate.set()
    left.join(60)
    assert not left.is_alive() and worker.is_checkpoint_written()
    worker.finish_checkpoint()
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert torch.equal(logprobs(worker), want)
    assert train(worker, [1]) == later


def test_optimizer_state_is_read_from_its_own_host_memory_and_all_else_is_copied_once(make_worker, tmp_path):
    worker = make_worker()
    train(worker, [0])
    arena = worker.engine.context.arena
    before = arena.allocated_bytes
    worker.start_checkpoint(str(tmp_path / "step_1"), save_optimizer=True)
    taken = arena.allocated_bytes - before
    params = sum(parameter.nbytes for parameter in worker.state.model[0].parameters())
    assert 2 * params <= taken < 2.5 * params  # the model's and the optimizer's; Adam's state would be as much again
    worker.finish_checkpoint()
    train(worker, [1])
    worker.start_checkpoint(str(tmp_path / "step_2"), save_optimizer=True)
    worker.finish_checkpoint()
    assert arena.allocated_bytes - before == taken  # kept for the next one
    worker.shutdown()
    assert PinnedArena.live_bytes() == 0


def test_a_checkpoint_in_the_phase_of_generation(make_worker, tmp_path, gate):
    """As after a validation: weights are on the host, where a log-prob pass of the reference weights writes, too."""
    worker = make_worker(init_reference_model=True)
    train(worker, [0])
    want = logprobs(worker)
    worker.offload_after_refit()
    assert worker.residency.phase is Phase.GENERATE
    worker.start_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    worker.get_reference_policy_logprobs(random_batch(3), mbs=3)
    later = train(worker, [1])
    gate.set()
    worker.finish_checkpoint()
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert torch.equal(logprobs(worker), want)
    assert train(worker, [1]) == later


def test_without_room_on_the_host_it_is_written_at_once(make_worker, tmp_path, monkeypatch, caplog):
    worker = make_worker()
    train(worker, [0])
    want = logprobs(worker)
    allocate = PinnedArena.allocate

    def full(self, owner, nbytes, **options):
        if owner == "checkpoints":
            raise HostMemoryError("the host gave none")
        return allocate(self, owner, nbytes, **options)

    monkeypatch.setattr(PinnedArena, "allocate", full)
    worker.start_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    assert worker.is_checkpoint_written()
    assert "is written before the run goes on: the host gave none" in caplog.text
    train(worker, [1])
    worker.finish_checkpoint()
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert torch.equal(logprobs(worker), want)


def test_a_full_disk_is_said_when_it_is_finished_and_the_next_one_is_whole(make_worker, tmp_path):
    worker = make_worker()
    train(worker, [0])
    with files_of_at_most(100_000):
        worker.start_checkpoint(str(tmp_path / "full"), save_optimizer=True)
        with pytest.raises(DiskFullError, match="File too large"):
            worker.finish_checkpoint()
    want = logprobs(worker)
    worker.start_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    train(worker, [1])
    worker.finish_checkpoint()
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert torch.equal(logprobs(worker), want)


def test_a_worker_that_ends_waits_for_its_writer(make_worker, tmp_path, gate):
    worker = make_worker()
    train(worker, [0])
    worker.start_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    threading.Timer(0.2, gate.set).start()
    worker.shutdown()
    assert PinnedArena.live_bytes() == 0
    assert not (tmp_path / "policy" / "layout.json").exists()  # it is no checkpoint


def save_beside_training(rank, world_size, ports):
    root = Path(os.environ["SAVE_BELOW"])
    worker = worker_of_rank(constant(tiny_policy(tensor_model_parallel_size=2)), rank, world_size, ports[0])
    for step in range(3):
        worker.train(random_batch(4, seed=step), NLLLoss(), gbs=4, mbs=2)
        want = worker.get_logprobs(random_batch(4), mbs=2)["logprobs"]
        worker.start_checkpoint(str(root / f"step_{step}"), save_optimizer=True)
        later = worker.train(random_batch(4, seed=step + 1), NLLLoss(), gbs=4, mbs=2)
        files = worker.finish_checkpoint()
        assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json", "layout.json"} <= files.keys()
        worker.load_checkpoint(str(root / f"step_{step}"))
        assert torch.equal(worker.get_logprobs(random_batch(4), mbs=2)["logprobs"], want)
        assert worker.train(random_batch(4, seed=step + 1), NLLLoss(), gbs=4, mbs=2) == later
        worker.load_checkpoint(str(root / f"step_{step}"))
    worker.shutdown()


def test_two_ranks_save_beside_training(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_BELOW", str(tmp_path))
    run_ranks(save_beside_training, 2, num_ports=1)
