"""Tests the offloader under a worker: numbers, checkpoints and memory, without a GPU."""

import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from support.phases import assert_ends, checksums, delay_compute, delay_moves, require_equal_bytes, run_steps
from support.ranks import fork_context, free_port, worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, random_batch, tiny_policy
from support.toy_policy import LocalTransport

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.build import _settle_dtypes
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.residency.table import Phase, Placement, Target
from nemo_offload_rl.residency.target import ResidencyError

GENERATION = {"backend": "transformers", "temperature": 1.0, "colocated": {"enabled": True}}
"""With it a refit follows each training: state leaves from the end of each."""


def offloading(policy, *, pinned=True, refits=False, **residency):
    policy["use_pinned_optimizer_offload"] = pinned
    policy["residency"] |= {"verify": True, "huge_pages": False} | residency
    return policy | ({"generation": GENERATION} if refits else {})


def policy_of(kind):
    optimizer = {"use_distributed_optimizer": "undistributed" not in kind}
    optimizer |= {"optimizer": "sgd", "sgd_momentum": 0.9} if "sgd" in kind else {}
    model = TINY_QWEN3_MOE if "moe" in kind else TINY_QWEN3
    return tiny_policy(model, "float32" if "fp32" in kind else "bfloat16", optimizer=optimizer)


# Each class of optimizer once; the checkpoint tests compare steps of the fourth, fp32 undistributed.
KINDS = ["bf16", "fp32", "bf16 undistributed sgd", "bf16 moe"]


NUM_STEPS = 4  # the last begins after a prefetch


@pytest.fixture(scope="module")
def plain_bf16() -> list[dict[str, Any]]:
    worker = worker_of_rank(policy_of("bf16"), 0, 1, free_port())
    torch.set_num_threads(1)
    reports = run_steps(worker, NUM_STEPS, visit_phases=False)
    worker.shutdown()
    return reports


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_all_phases_between_are_bit_equal_to_none(make_worker, monkeypatch, request, kind):
    plain = request.getfixturevalue("plain_bf16") if kind == "bf16" else None
    plain = plain or run_steps(make_worker(policy_of(kind)), NUM_STEPS, visit_phases=False)
    delay_moves(monkeypatch, seconds=0.003)
    worker = make_worker(offloading(policy_of(kind)))
    assert run_steps(worker, NUM_STEPS, visit_phases=True) == plain
    metrics = worker.residency_metrics()
    assert metrics["refit/optimizer_state/gb"] > 0
    assert metrics["generate/params/gb"] > 0


def test_late_compute_precedes_every_update_and_move(make_worker, monkeypatch, plain_bf16):
    num_sleeps = delay_compute(monkeypatch)
    worker = make_worker(offloading(policy_of("bf16")), init_reference_model=True)
    assert run_steps(worker, NUM_STEPS, visit_phases=True) == plain_bf16
    worker.get_reference_policy_logprobs(random_batch(4), mbs=2)
    assert num_sleeps["ChainedOptimizer.step_with_ready_grads"] == NUM_STEPS
    moves = {name: num_sleeps[f"Mover.{name}"] for name in ("out", "back", "drop", "take", "exchange", "put_back")}
    assert min(moves.values()) > 0, moves
    assert moves["out"] >= NUM_STEPS


def test_state_that_leaves_with_the_end_of_training_changes_no_number(make_worker, monkeypatch, plain_bf16):
    delay_moves(monkeypatch, seconds=0.003)
    policy = offloading(policy_of("bf16"), refits=True)
    worker = make_worker(policy)
    assert run_steps(worker, NUM_STEPS, visit_phases=True) == plain_bf16
    worker.prepare_for_training()
    worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
    assert worker.residency.phase is Phase.TRAIN
    assert worker.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST
    assert worker.residency.where(Target.GRADS) is Placement.DROPPED
    again = make_worker(policy)
    assert run_steps(again, NUM_STEPS, visit_phases=False) == plain_bf16  # training may follow, too


def test_a_copy_that_fails_beside_other_work_is_an_error_of_the_next_phase(make_worker, monkeypatch):
    worker = make_worker(offloading(policy_of("bf16"), verify=False, refits=True))

    def fail(backed, chunk):
        monkeypatch.undo()
        raise RuntimeError("the link is gone")

    monkeypatch.setattr(worker.offloader.context.mover, "_copy_out", fail)
    worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)  # its results are complete before the move fails
    worker.offload_before_refit()
    with pytest.raises(ResidencyError, match=r"Cannot move optimizer_state off the GPU for phase refit: the link is"):
        worker.offload_after_refit()


def test_masters_and_moments_leave_and_what_the_model_shares_stays(make_worker):
    worker = make_worker(offloading(policy_of("bf16")))
    count = sum(p.numel() for _, p in worker.state.parameters())
    sizes = worker.offloader.nbytes()
    assert sizes[Target.OPTIMIZER_STATE] == pytest.approx(12 * count, rel=0.02)
    worker.offload_after_refit()
    assert worker.offloader.mapped_bytes == 0
    assert worker.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST
    worker.prepare_for_training()
    worker.residency.require(Target.OPTIMIZER_STATE)
    assert worker.offloader.mapped_bytes == sum(sizes.values())

    worker = make_worker(offloading(policy_of("fp32")))
    assert worker.offloader.nbytes()[Target.OPTIMIZER_STATE] == pytest.approx(8 * count, rel=0.02)


@pytest.mark.parametrize("kind", ["bf16", "fp32 undistributed"])
def test_a_checkpoint_saved_while_offloaded_has_the_same_bytes(make_worker, tmp_path, kind):
    require_equal_bytes(lambda: make_worker(offloading(policy_of(kind))), tmp_path)


def test_a_checkpoint_loads_while_offloaded(make_worker, tmp_path):
    worker = make_worker(offloading(policy_of("bf16")))
    run_steps(worker, 2, visit_phases=False)
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    want = run_steps(worker, 2, visit_phases=False)
    worker = make_worker(offloading(policy_of("bf16")), seed=99)
    run_steps(worker, 1, visit_phases=True)
    worker.offload_after_refit()
    worker.load_checkpoint(str(tmp_path / "policy"))
    worker.offload_after_refit()
    assert run_steps(worker, 2, visit_phases=True) == want


def test_reference_weights_are_swapped_in_and_out(make_worker):
    worker = make_worker(offloading(policy_of("bf16")), init_reference_model=True)
    data = random_batch(4)
    start = worker.get_logprobs(data, mbs=2)["logprobs"]
    worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
    worker.offload_after_refit()
    trained, bits = worker.get_logprobs(data, mbs=2)["logprobs"], checksums(worker)
    assert torch.equal(worker.get_reference_policy_logprobs(data, mbs=2)["reference_logprobs"], start)
    assert checksums(worker) == bits
    assert torch.equal(worker.get_logprobs(data, mbs=2)["logprobs"], trained)
    with pytest.raises(RuntimeError, match="on purpose"), worker.offloader.reference.swapped_in():
        raise RuntimeError("on purpose")
    assert checksums(worker) == bits


def verbs(worker, folder):
    """Returns calls of what a worker does with its weights and its optimizer's state."""
    data = random_batch(8)
    return [
        lambda: worker.get_logprobs(data, mbs=2),
        lambda: worker.evaluate(data, NLLLoss(), mbs=2),
        lambda: worker.train(data, NLLLoss(), gbs=8, mbs=2),
        lambda: worker.save_checkpoint(str(folder / "policy"), save_optimizer=True),
        partial(worker.load_checkpoint, str(folder / "policy")), partial(worker.export_hf, str(folder / "hf")),
        partial(worker.prepare_refit_info, LocalTransport([])), worker.offload_before_refit, worker.offload_after_refit,
    ]  # fmt: skip


@pytest.mark.parametrize("number", [0, 1], ids=["in", "back"])  # the params have one chunk
def test_weights_that_a_swap_has_lost_are_refused_by_every_verb(make_worker, monkeypatch, tmp_path, number):
    worker = make_worker(offloading(policy_of("bf16")), init_reference_model=True)
    data = random_batch(8)
    worker.train(data, NLLLoss(), gbs=8, mbs=2)
    mover, done = worker.offloader.context.mover, []
    copy_back = mover._copy_back

    def copy_or_fail(backed, chunk):
        done.append(chunk)
        if len(done) > number:
            raise MemoryError("no staging buffer")
        copy_back(backed, chunk)

    monkeypatch.setattr(mover, "_copy_back", copy_or_fail)
    worker_verbs = [lambda: worker.get_reference_policy_logprobs(data, mbs=2), *verbs(worker, tmp_path)]
    for verb in worker_verbs * 2:  # none of them frees memory for another
        with pytest.raises(ResidencyError, match=r"weights are lost.*restart the worker from the last checkpoint"):
            verb()
    worker.residency_metrics()
    assert_ends(worker)


def test_a_worker_that_used_staging_buffers_may_be_shut_down_twice(make_worker):
    worker = make_worker(offloading(policy_of("bf16")))
    with worker.offloader.context.mover._ring(worker.offloader.context.mover._out):
        pass
    assert_ends(worker)
    worker.shutdown()


def test_a_single_cell_of_the_table_can_be_overridden(make_worker):
    worker = make_worker(offloading(policy_of("bf16"), table={"generate": {"params": "keep"}}))
    worker.offload_after_refit()
    assert worker.residency.where(Target.PARAMS) is Placement.GPU
    assert worker.offloader.mapped_bytes == worker.offloader.nbytes()[Target.PARAMS]
    (params,) = worker.offloader.targets[Target.PARAMS].flat_buffer.backed_ranges
    assert params.host is None  # so it uses no host memory


@pytest.mark.parametrize("pinned", [True, False])
def test_too_little_host_memory_is_refused_before_anything_is_pinned(make_worker, pinned):
    worker = make_worker(offloading(policy_of("bf16"), pinned=pinned))
    sizes = worker.offloader.nbytes()
    worker.shutdown()
    params_alone = (sizes[Target.PARAMS] + sizes[Target.OPTIMIZER_STATE] / 2) / 2**30
    with pytest.raises(HostBudgetError, match="host_memory_limit_gib"):
        make_worker(offloading(policy_of("bf16"), pinned=pinned, host_memory_limit_gib=params_alone))
    assert PinnedArena.live_bytes() == 0


def hold_host_memory(when, port, pipe):
    """Moves everything to the host, reports how much is held there, and waits to be killed."""
    worker = worker_of_rank(offloading(policy_of("bf16"), verify=False), 0, 1, port, init_reference_model=True)
    worker.offload_before_refit()
    if when == "offloaded":
        worker.offload_after_refit()
    pipe.send(PinnedArena.live_bytes())
    time.sleep(600)


@pytest.mark.parametrize("when", ["offloaded", "on its way out"])
def test_a_killed_worker_leaves_nothing_behind(when):
    shared_memory = {path.name for path in Path("/dev/shm").iterdir()}
    context = fork_context()
    ours, theirs = context.Pipe()
    worker = context.Process(target=hold_host_memory, args=(when, free_port(), theirs), daemon=True)
    worker.start()
    theirs.close()
    try:
        assert ours.poll(timeout=180)
        assert ours.recv() > 1e6
        children = psutil.Process(worker.pid).children(recursive=True)
    finally:
        worker.kill()
    worker.join(timeout=30)
    assert worker.exitcode == -signal.SIGKILL
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()]
    assert {path.name for path in Path("/dev/shm").iterdir()} <= shared_memory  # anonymous memory ends with the process


def test_routers_take_their_expert_bias_back_to_fp32_before_it_is_housed(make_worker):
    """Routers convert it in every forward pass into new memory, which the reference weights would not have."""
    worker = make_worker(policy_of("bf16 moe"))
    routers = [module for module in worker.state.model[0].modules() if isinstance(module, TopKRouter)]
    for router in routers:
        del router.expert_bias
        router.register_buffer("expert_bias", torch.ones(4, dtype=torch.bfloat16))  # as Float16Module leaves it
    _settle_dtypes(worker.state.model)
    assert routers
    assert all(router.expert_bias.dtype is torch.float32 for router in routers)
