"""Tests streamed optimizer state under a worker: numbers, checkpoints, failures; no GPU, late copies."""

import os
import re

import pytest
import torch
from support.late_streams import LateStream
from support.phases import assert_ends, checkpoint_entries, checksums, delay_compute, differing, run_steps, save
from support.ranks import off_and_on, run_ranks, worker_of_rank
from support.tiny import offloading_activations, random_batch

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.residency.streamed import window
from nemo_offload_rl.residency.streamed.init_state import has_no_memory
from nemo_offload_rl.residency.streamed.step import HalfUpdatedError
from nemo_offload_rl.residency.table import Placement, Target
from tests.unit.mcore.test_residency import policy_of as policy_of_kind
from tests.unit.mcore.test_residency import verbs

STREAMED = {"train": {"optimizer_state": "streamed"}}


@pytest.fixture(autouse=True)
def _late_copies(monkeypatch):
    monkeypatch.setattr(window, "CopyStream", LateStream)


def policy_of(kind, *, streamed=True, **keys):
    policy = policy_of_kind(kind)
    policy["megatron_cfg"]["expert_model_parallel_size"] = 2 if "ep2" in kind else 1
    policy["offload_optimizer_for_refit"] = True
    policy["residency"] |= {"huge_pages": False, "stream_window_mib": 1, "table": STREAMED if streamed else None}
    return policy | keys


@pytest.mark.parametrize("kind", ["bf16", "bf16 undistributed", "fp32 undistributed", "bf16 moe"])
def test_steps_are_bit_equal_to_those_with_resident_state(make_worker, monkeypatch, kind):
    num_sleeps = delay_compute(monkeypatch)
    plain = run_steps(make_worker(policy_of(kind, streamed=False)), 3, visit_phases=False)
    worker = make_worker(policy_of(kind))
    num_chunks = sum(step.num_chunks for step in worker.offloader.targets[Target.OPTIMIZER_STATE].steps)
    assert num_chunks > 4
    num_sleeps.clear()
    assert run_steps(worker, 3, visit_phases=True) == plain
    assert num_sleeps["Window.store"] == 3 * num_chunks
    assert_ends(worker)


def test_activations_may_be_offloaded_beside_it(make_worker, late):
    plain = run_steps(make_worker(policy_of("bf16", streamed=False)), 2, visit_phases=False)
    worker = make_worker(offloading_activations(policy_of("bf16"), ["qkv_linear", "core_attn", "attn_proj"], gbs=8))
    assert run_steps(worker, 2, visit_phases=True) == plain
    assert worker.activations.offloader.report.total().moved_bytes > 0


def test_nothing_of_the_state_is_ever_made_on_the_device_where_the_window_alone_comes_and_goes(make_worker):
    worker = make_worker(policy_of("bf16"))
    count = sum(p.numel() for _, p in worker.state.parameters())
    state = worker.offloader.targets[Target.OPTIMIZER_STATE]
    assert state.host_nbytes == pytest.approx(12 * count, rel=0.03)
    (inner,) = (part.optimizer for part in worker.state.optimizer.chained_optimizers)
    tensors = [p for group in inner.param_groups for p in group["params"]]
    tensors += [value for values in inner.state.values() for value in values.values() if value.dim()]
    assert len(tensors) == 3 * len(inner.state)
    assert all(has_no_memory(tensor) for tensor in tensors)
    assert worker.offloader.nbytes()[Target.OPTIMIZER_STATE] == 2**20
    worker.prepare_for_training()
    worker.residency.require(Target.OPTIMIZER_STATE)
    assert worker.residency.where(Target.OPTIMIZER_STATE) is Placement.STREAMED
    assert worker.offloader.mapped_bytes == sum(worker.offloader.nbytes().values())
    run_steps(worker, 2, visit_phases=True)
    metrics = worker.residency_metrics()
    assert metrics["train/optimizer_state/gb"] == pytest.approx(2 * 2 * state.host_nbytes / 1e9)
    assert "refit/optimizer_state/gb" not in metrics
    worker.offload_after_refit()
    assert worker.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST
    assert worker.offloader.mapped_bytes == 0


@pytest.mark.parametrize("kind", ["bf16", "bf16 undistributed"])
def test_checkpoints_are_those_of_resident_state_and_load_into_streamed_state(make_worker, tmp_path, kind):
    worker = make_worker(policy_of(kind, streamed=False))
    run_steps(worker, 2, visit_phases=False)
    save(worker, tmp_path / "resident")
    wanted = run_steps(worker, 2, visit_phases=False)
    worker = make_worker(policy_of(kind))
    run_steps(worker, 2, visit_phases=True)
    worker.offload_after_refit()
    save(worker, tmp_path / "streamed")
    # So a streamed run's checkpoint also resumes with resident state.
    assert differing(checkpoint_entries(tmp_path / "resident"), checkpoint_entries(tmp_path / "streamed")) == []
    run_steps(worker, 1, visit_phases=True)
    worker.prepare_for_training()
    worker.offloader.prefetch_streamed_state()  # the window's contents are stale then
    worker.load_checkpoint(str(tmp_path / "resident"))
    assert run_steps(worker, 2, visit_phases=True) == wanted


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "around refit"])
def test_a_run_resumes_into_and_out_of_state_that_is_not_page_locked(make_worker, tmp_path, streamed):
    worker = make_worker(policy_of("bf16", streamed=streamed, use_pinned_optimizer_offload=False))
    run_steps(worker, 2, visit_phases=True)
    worker.offload_after_refit()
    worker.save_checkpoint(str(tmp_path / "pageable"), save_optimizer=True)
    worker.prepare_for_training()
    wanted = run_steps(worker, 2, visit_phases=True)
    worker.offload_after_refit()
    worker.load_checkpoint(str(tmp_path / "pageable"))
    assert run_steps(worker, 2, visit_phases=True) == wanted
    worker = make_worker(policy_of("bf16", streamed=streamed))
    worker.load_checkpoint(str(tmp_path / "pageable"))
    assert run_steps(worker, 2, visit_phases=True) == wanted


def test_a_step_that_is_not_finite_moves_nothing_back(make_worker):
    def nan_loss(logprobs, data, counts):
        loss, metrics = NLLLoss()(logprobs, data, counts)
        return loss * float("nan"), metrics

    plain = run_steps(make_worker(policy_of("bf16", streamed=False)), 2, visit_phases=False)
    worker = make_worker(policy_of("bf16", max_skipped_steps=3))
    assert run_steps(worker, 1, visit_phases=False) == plain[:1]
    bits = checksums(worker)
    worker.residency_metrics()
    assert worker.train(random_batch(8), nan_loss, gbs=8, mbs=2)["num_skipped"] == 1
    assert checksums(worker) == bits
    assert "train/optimizer_state/gb" not in worker.residency_metrics()
    worker.state.scheduler.step(increment=-1)  # the skipped step has moved the schedule
    report = worker.train(random_batch(8, seed=1), NLLLoss(), gbs=8, mbs=2)
    assert {name: plain[1][name] for name in report} == report
    assert checksums(worker) == plain[1]["checksums"]


def test_after_a_step_that_failed_in_the_middle_every_verb_is_refused(make_worker, monkeypatch, tmp_path):
    worker = make_worker(policy_of("bf16"))
    data = random_batch(8)
    worker.train(data, NLLLoss(), gbs=8, mbs=2)
    copies = worker.offloader.targets[Target.OPTIMIZER_STATE].window.copies

    def fail(*_):
        raise RuntimeError("the link is down")

    monkeypatch.setattr(copies, "to_host", fail)
    with pytest.raises(HalfUpdatedError, match=r"in chunk 1 of 8 \(RuntimeError: the link is down\)"):
        worker.train(data, NLLLoss(), gbs=8, mbs=2)
    monkeypatch.undo()
    for verb in verbs(worker, tmp_path):
        with pytest.raises(HalfUpdatedError, match=r"half updated.*restart from the newest checkpoint"):
            verb()
    worker.residency_metrics()
    assert_ends(worker)


def errors_of_a_chain(rank, world_size, ports):
    """Returns the error of a step whose copies fail at the start of the experts' optimizer, and later verbs' errors."""
    worker, data = worker_of_rank(policy_of("bf16 moe ep2"), rank, world_size, ports[0]), random_batch(8)
    worker.train(data, NLLLoss(), gbs=16, mbs=2)
    state, said = worker.offloader.targets[Target.OPTIMIZER_STATE], []
    assert len(state.steps) == 2
    of_experts, to_gpu = [one.segment for one in state.steps[1]._arrays], state.window.copies.to_gpu

    def fail(segment, parts):
        if segment in of_experts:
            raise RuntimeError("the link is down")
        to_gpu(segment, parts)

    state.window.copies.to_gpu = fail
    for verb in (
        lambda: worker.train(data, NLLLoss(), gbs=16, mbs=2),
        lambda: worker.get_logprobs(data, mbs=2),
        lambda: worker.save_checkpoint(os.environ["SAVE_BELOW"], save_optimizer=True),
    ):
        try:
            verb()
        except HalfUpdatedError as error:
            said.append(str(error))
    worker.shutdown()
    return said


def test_no_verb_goes_on_where_experts_fail_behind_the_others_update(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_BELOW", str(tmp_path))
    for said in run_ranks(errors_of_a_chain, 2, num_ports=1):
        assert len(said) == 3
        words = r"in chunk 1 of \d+ of optimizer 2 of 2 .*the link is down.*half updated"
        assert all(re.search(words, one) for one in said)


LAYOUTS = ["bf16", "bf16 moe ep2"]


def run(layout, rank, world_size, port, *, streamed):
    """Returns the steps' reports on this rank, whose shards cut parameters, and the number of its chunks."""
    window.CopyStream = LateStream  # in this process, which no other test uses
    worker = worker_of_rank(policy_of(layout, streamed=streamed), rank, world_size, port)
    torch.set_num_threads(1)
    reports = run_steps(worker, 3, visit_phases=streamed)
    steps = worker.offloader.targets[Target.OPTIMIZER_STATE].steps if streamed else []
    worker.shutdown()
    return reports, sum(step.num_chunks for step in steps)


def all_layouts(rank, world_size, ports):
    return off_and_on(LAYOUTS, ports, lambda layout, port, on: run(layout, rank, world_size, port, streamed=on))


def test_steps_of_two_ranks_are_those_with_resident_state():
    for rank, layouts in enumerate(run_ranks(all_layouts, 2, num_ports=2 * len(LAYOUTS))):
        for layout, ((plain, _), (streamed, num_chunks)) in layouts.items():
            assert streamed == plain, f"rank {rank}, {layout}"
            assert num_chunks > 3
