"""Tests streamed optimizer state on a CUDA GPU: equal numbers, and no more GPU memory than the window."""

import pytest
import torch
from support.gpu import EXACTLY, MIB, gpu_policy, refuse_page_locks
from support.phases import checkpoint_entries, checksums, delay_compute, differing, each_delay, run_steps, save
from support.tiny import random_batch

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.streamed.init_state import has_no_memory
from nemo_offload_rl.residency.streamed.step import HalfUpdatedError
from nemo_offload_rl.residency.streamed.window import Window
from nemo_offload_rl.residency.table import Phase, Placement, Target

pytestmark = EXACTLY

WINDOW_MIB = 8


def policy_of(kind, monkeypatch, *, streamed=True, verify=False):
    policy = gpu_policy(kind, monkeypatch)
    policy["offload_optimizer_for_refit"] = True
    policy["residency"] |= {"verify": verify, "huge_pages": False, "stream_window_mib": WINDOW_MIB}
    if streamed:
        policy["residency"]["table"] = {"train": {"optimizer_state": "streamed"}}
    return policy


def state_of(worker):
    return worker.offloader.targets[Target.OPTIMIZER_STATE]


def delay_stream(stream, monkeypatch, *, seconds):
    """Makes each group of copies on one stream start late."""
    copy_all = stream.copy_all

    def late(pairs):
        with torch.cuda.stream(stream.stream):
            torch.cuda._sleep(int(seconds * 1.5e9))  # cycles
        copy_all(pairs)

    monkeypatch.setattr(stream, "copy_all", late)


KINDS = [
    "fused_adam",
    "torch_adamw",
    "precision_aware",
    "undistributed",
    "moe",
    "moe precision_aware",
    "moe torch_adamw",
]


@each_delay
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_with_all_phases_between_are_bit_equal_to_resident_state(make_worker, monkeypatch, kind, delay):
    plain = run_steps(make_worker(policy_of(kind, monkeypatch, streamed=False)), 20, visit_phases=False)
    worker = make_worker(policy_of(kind, monkeypatch, verify="moe" in kind))
    inner = worker.state.optimizer.chained_optimizers[0].optimizer
    assert isinstance(inner, torch.optim.AdamW) == ("torch_adamw" in kind)
    assert sum(step.num_chunks for step in state_of(worker).steps) > 8
    delay(monkeypatch, seconds=0.001)
    assert run_steps(worker, 20, visit_phases=True) == plain


@pytest.mark.parametrize("missing", ["arrival", "departure", "update"])
def test_a_missing_wait_would_show(make_worker, monkeypatch, missing):
    plain = run_steps(make_worker(policy_of("fused_adam", monkeypatch, streamed=False)), 3, visit_phases=False)
    worker = make_worker(policy_of("fused_adam", monkeypatch))
    copies = state_of(worker).window.copies
    if missing == "departure":  # chunks arrive in slots whose contents have not been copied out yet
        monkeypatch.setattr(copies.back, "follow", lambda mark: None)
        delay_stream(copies.out, monkeypatch, seconds=0.2)
    elif missing == "update":  # chunks leave before they are updated
        monkeypatch.setattr(copies.out, "follow_current_stream", lambda: None)
        delay_compute(monkeypatch, seconds=0.02)
    else:
        delay_stream(copies.back, monkeypatch, seconds=0.02)
        fetch = Window.fetch

        def unheld(self, arrays, chunk):
            slot = fetch(self, arrays, chunk)
            slot.arrived = type("Never", (), {"wait_on_current_stream": lambda _: None, "wait": lambda _: None})()
            return slot

        monkeypatch.setattr(Window, "fetch", unheld)
    assert run_steps(worker, 3, visit_phases=False) != plain


@pytest.mark.whole_gpu
def test_the_gpu_never_holds_more_of_it_than_the_window(make_worker, monkeypatch):
    """Checks the build of the optimizer, the creation of its state, and a step."""

    def peak_beside(streamed):
        torch.cuda.reset_peak_memory_stats()
        worker = make_worker(policy_of("precision_aware", monkeypatch, streamed=streamed))
        worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
        worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
        peak = torch.cuda.max_memory_allocated()
        sizes = worker.offloader.nbytes()
        torch.cuda.synchronize()
        return peak, sizes, worker

    _, resident_sizes, _ = peak_beside(streamed=False)
    peak, sizes, worker = peak_beside(streamed=True)
    assert state_of(worker).host_nbytes == pytest.approx(resident_sizes[Target.OPTIMIZER_STATE], rel=0.02)
    assert sizes[Target.OPTIMIZER_STATE] == WINDOW_MIB * MIB
    inner = worker.state.optimizer.chained_optimizers[0].optimizer
    assert all(has_no_memory(value) for state in inner.state.values() for value in state.values() if value.dim())
    # Params and gradients may exist twice for a moment, as they move into ranges.
    assert peak < 2.2 * (sizes[Target.PARAMS] + sizes[Target.GRADS]) + resident_sizes[Target.OPTIMIZER_STATE] / 2
    before = torch.cuda.mem_get_info()[0]
    worker.offload_after_refit()
    assert worker.offloader.mapped_bytes == 0
    assert torch.cuda.mem_get_info()[0] > before


@pytest.mark.parametrize("kind", ["fused_adam", "precision_aware", "undistributed"])
def test_checkpoints_are_those_of_resident_state_and_load_either_way(make_worker, monkeypatch, tmp_path, kind):
    worker = make_worker(policy_of(kind, monkeypatch, streamed=False))
    run_steps(worker, 2, visit_phases=False)
    save(worker, tmp_path / "resident")
    wanted = run_steps(worker, 2, visit_phases=False)
    worker = make_worker(policy_of(kind, monkeypatch))
    run_steps(worker, 2, visit_phases=True)
    save(worker, tmp_path / "streamed")
    assert differing(checkpoint_entries(tmp_path / "resident"), checkpoint_entries(tmp_path / "streamed")) == []
    run_steps(worker, 1, visit_phases=False)
    worker.load_checkpoint(str(tmp_path / "resident"))
    assert run_steps(worker, 2, visit_phases=True) == wanted
    worker = make_worker(policy_of(kind, monkeypatch, streamed=False))
    worker.load_checkpoint(str(tmp_path / "streamed"))
    assert run_steps(worker, 2, visit_phases=True) == wanted


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["fused_adam", "torch_adamw", "precision_aware"])
def test_a_checkpoint_of_the_cpu_optimizer_is_trained_on(make_worker, monkeypatch, tmp_path, kind, fraction):
    policy = policy_of("precision_aware", monkeypatch, streamed=False)
    policy["megatron_cfg"]["optimizer"] |= {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }
    worker = make_worker(policy)
    run_steps(worker, 2, visit_phases=True)
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    want = run_steps(worker, 2, visit_phases=True)
    worker = make_worker(policy_of(kind, monkeypatch), seed=99)
    worker.load_checkpoint(str(tmp_path / "policy"))
    for one, other in zip(run_steps(worker, 2, visit_phases=True), want, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=0.05)


def test_staging_carries_what_cannot_be_page_locked(make_worker, monkeypatch):
    plain = run_steps(make_worker(policy_of("fused_adam", monkeypatch, streamed=False)), 3, visit_phases=False)
    refuse_page_locks(monkeypatch)
    worker = make_worker(policy_of("fused_adam", monkeypatch, verify=True))
    assert worker.offloader.context.arena.pinned_bytes == 0
    assert run_steps(worker, 3, visit_phases=True) == plain


def test_a_copy_that_fails_in_the_middle_ends_the_step_and_every_verb_behind_it(make_worker, monkeypatch):
    worker = make_worker(policy_of("fused_adam", monkeypatch))
    worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
    copies, left = state_of(worker).window.copies, [3]
    to_host = copies.to_host

    def fail_later(segment, parts):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the link is down")
        to_host(segment, parts)

    monkeypatch.setattr(copies, "to_host", fail_later)
    with pytest.raises(HalfUpdatedError, match=r"in chunk 4 of \d+ \(RuntimeError: the link is down\)"):
        worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
    with pytest.raises(HalfUpdatedError, match="restart from the newest checkpoint"):
        worker.get_logprobs(random_batch(4), mbs=2)
    worker.shutdown()
    assert PinnedArena.live_bytes() == 0


def test_a_step_that_is_skipped_moves_nothing_back(make_worker, monkeypatch):
    def nan_loss(logprobs, data, counts):
        loss, metrics = NLLLoss()(logprobs, data, counts)
        return loss * float("nan"), metrics

    worker = make_worker(policy_of("fused_adam", monkeypatch) | {"max_skipped_steps": 1})
    run_steps(worker, 1, visit_phases=False)
    bits = checksums(worker)
    read = worker.offloader.checkpoint_reader()
    inner = worker.state.optimizer.chained_optimizers[0].optimizer
    before = [read(value).clone() for state in inner.state.values() for value in state.values() if value.dim()]
    worker.train(random_batch(8), nan_loss, gbs=8, mbs=2)
    after = [read(value) for state in inner.state.values() for value in state.values() if value.dim()]
    assert checksums(worker) == bits
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.whole_gpu
def test_no_room_for_the_window_is_said_at_the_start(make_worker, monkeypatch):
    policy = policy_of("fused_adam", monkeypatch)
    policy["residency"]["stream_window_mib"] = torch.cuda.mem_get_info()[1] // MIB
    with pytest.raises(OutOfGpuMemoryError, match=r"Cannot allocate the window .*policy\.residency\.stream_window_mib"):
        make_worker(policy)
    make_worker(policy_of("fused_adam", monkeypatch))


def test_the_window_alone_comes_and_goes(make_worker, monkeypatch):
    worker = make_worker(policy_of("fused_adam", monkeypatch))
    run_steps(worker, 2, visit_phases=True)
    metrics = worker.residency_metrics()
    assert metrics["train/optimizer_state/gb"] == pytest.approx(2 * 2 * state_of(worker).host_nbytes / 1e9)
    assert metrics["train/optimizer_state/share_of_link"] > 0
    assert "refit/optimizer_state/gb" not in metrics
    worker.residency.enter(Phase.GENERATE)
    assert worker.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST
    assert worker.offloader.mapped_bytes == 0
