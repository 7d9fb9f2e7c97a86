"""Tests the offloader on a CUDA GPU, with resident and streamed state: equal numbers, and memory that is free."""

import gc

import pytest
import torch
from support.gpu import EXACTLY, MIB, gpu_policy, refuse_page_locks
from support.phases import checkpoint_entries, checksums, differing, each_delay, require_equal_bytes, run_steps, save
from support.tiny import random_batch

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError, VirtualRange
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.streamed.init_state import has_no_memory
from nemo_offload_rl.residency.table import Phase, Placement, Target
from nemo_offload_rl.residency.target import ResidencyError

pytestmark = EXACTLY


def offloading(policy, *, pinned=True, verify=False):
    policy["use_pinned_optimizer_offload"] = pinned
    policy["residency"] |= {"verify": verify, "huge_pages": False, "host_memory_limit_gib": None, "table": None}
    return policy


def policy_of(kind, monkeypatch):
    policy = gpu_policy(kind, monkeypatch)
    if "early" in kind:  # a refit follows each training, and state is offloaded from the end of the training
        policy["generation"] = {"backend": "transformers", "temperature": 1.0, "colocated": {"enabled": True}}
    return policy


@each_delay
@pytest.mark.parametrize(
    "kind", ["fused_adam", "torch_adamw", "precision_aware early", "moe", "moe precision_aware early"]
)
def test_twenty_steps_with_all_phases_between_are_bit_equal_to_none(make_worker, monkeypatch, kind, delay):
    plain = run_steps(make_worker(policy_of(kind.removesuffix("early"), monkeypatch)), 20, visit_phases=False)
    worker = make_worker(offloading(policy_of(kind, monkeypatch), verify=True))
    inner = worker.state.optimizer.chained_optimizers[0].optimizer
    assert isinstance(inner, torch.optim.AdamW) == ("torch_adamw" in kind)
    delay(monkeypatch)
    assert run_steps(worker, 20, visit_phases=True) == plain
    assert isinstance(worker.offloader.targets[Target.OPTIMIZER_STATE].flat_buffer.backed_ranges[0].range, VirtualRange)


def test_the_pageable_way_changes_no_number_either(make_worker, monkeypatch):
    plain = run_steps(make_worker(policy_of("fused_adam", monkeypatch)), 5, visit_phases=False)
    worker = make_worker(offloading(policy_of("fused_adam", monkeypatch), pinned=False))
    assert run_steps(worker, 5, visit_phases=True) == plain


def test_staging_carries_what_cannot_be_page_locked(make_worker, monkeypatch):
    plain = run_steps(make_worker(policy_of("fused_adam", monkeypatch)), 3, visit_phases=False)
    refuse_page_locks(monkeypatch)
    worker = make_worker(offloading(policy_of("fused_adam", monkeypatch), verify=True), init_reference_model=True)
    assert not worker.offloader.targets[Target.OPTIMIZER_STATE].flat_buffer.backed_ranges[0].host.pinned
    assert run_steps(worker, 3, visit_phases=True) == plain
    bits = checksums(worker)
    worker.get_reference_policy_logprobs(random_batch(4), mbs=2)
    assert checksums(worker) == bits


@pytest.mark.whole_gpu
@pytest.mark.parametrize("kind", ["fused_adam", "precision_aware"])
def test_the_driver_gets_back_what_left(make_worker, monkeypatch, kind):
    worker = make_worker(offloading(policy_of(kind, monkeypatch)), init_reference_model=True)
    run_steps(worker, 2, visit_phases=True)
    worker.prepare_for_training()
    worker.residency.require(Target.OPTIMIZER_STATE)
    sizes = worker.offloader.nbytes()
    count = sum(p.numel() for _, p in worker.state.parameters())
    per_parameter = 10 if kind == "precision_aware" else 12
    assert sizes[Target.OPTIMIZER_STATE] == pytest.approx(per_parameter * count, rel=0.02)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    worker.offload_after_refit()
    left = sizes[Target.PARAMS] + sizes[Target.GRADS] + sizes[Target.OPTIMIZER_STATE]
    assert torch.cuda.mem_get_info()[0] - before >= 0.99 * left


@each_delay
def test_reference_weights_are_swapped_in_and_out(make_worker, monkeypatch, delay):
    worker = make_worker(offloading(policy_of("fused_adam", monkeypatch)), init_reference_model=True)
    data = random_batch(4)
    start = worker.get_logprobs(data, mbs=2)["logprobs"]
    worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
    worker.offload_after_refit()
    trained, bits = worker.get_logprobs(data, mbs=2)["logprobs"], checksums(worker)
    delay(monkeypatch)
    assert torch.equal(worker.get_reference_policy_logprobs(data, mbs=2)["reference_logprobs"], start)
    assert checksums(worker) == bits
    assert torch.equal(worker.get_logprobs(data, mbs=2)["logprobs"], trained)


@pytest.mark.parametrize("kind", ["fused_adam", "precision_aware"])
def test_a_checkpoint_saved_while_offloaded_has_the_same_bytes(make_worker, monkeypatch, tmp_path, kind):
    require_equal_bytes(lambda: make_worker(offloading(policy_of(kind, monkeypatch))), tmp_path)


@pytest.mark.whole_gpu
def test_no_room_on_the_gpu_is_said_and_harms_nothing(make_worker, monkeypatch):
    worker = make_worker(offloading(policy_of("fused_adam", monkeypatch)))
    run_steps(worker, 2, visit_phases=True)
    want = checksums(worker)
    worker.offload_after_refit()
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - 160 * MIB, dtype=torch.uint8, device="cuda")

    def come_back():
        worker.prepare_for_training()
        worker.residency.require(Target.OPTIMIZER_STATE)

    with pytest.raises(ResidencyError, match=r"Cannot move optimizer_state to the GPU for phase train.*GiB free"):
        come_back()
    del hog
    torch.cuda.empty_cache()
    assert worker.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST
    worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
    assert checksums(worker) != want


@pytest.mark.whole_gpu
def test_a_worker_gives_all_its_memory_back(make_worker, monkeypatch):
    def free_after_a_life() -> int:
        worker = make_worker(offloading(policy_of("fused_adam", monkeypatch)), init_reference_model=True)
        run_steps(worker, 1, visit_phases=True)
        worker.residency.enter(Phase.GENERATE)
        worker.shutdown()
        assert PinnedArena.live_bytes() == 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    # The first worker loads kernels and allocates workspaces, which the process keeps.
    first = free_after_a_life()
    assert first - free_after_a_life() < 64 * MIB
    make_worker()


WINDOW_MIB = 8


def streaming_policy(kind, monkeypatch, *, streamed=True, verify=False):
    policy = gpu_policy(kind, monkeypatch)
    policy["offload_optimizer_for_refit"] = True
    policy["residency"] |= {"verify": verify, "huge_pages": False, "stream_window_mib": WINDOW_MIB}
    if streamed:
        policy["residency"]["table"] = {"train": {"optimizer_state": "streamed"}}
    return policy


def state_of(worker):
    return worker.offloader.targets[Target.OPTIMIZER_STATE]


STREAMED_KINDS = [
    "fused_adam", "torch_adamw", "precision_aware", "undistributed", "moe", "moe precision_aware", "moe torch_adamw",
]  # fmt: skip


@each_delay
@pytest.mark.parametrize("kind", STREAMED_KINDS)
def test_twenty_steps_with_all_phases_between_are_bit_equal_to_resident_state(make_worker, monkeypatch, kind, delay):
    plain = run_steps(make_worker(streaming_policy(kind, monkeypatch, streamed=False)), 20, visit_phases=False)
    worker = make_worker(streaming_policy(kind, monkeypatch, verify="moe" in kind))
    inner = worker.state.optimizer.chained_optimizers[0].optimizer
    assert isinstance(inner, torch.optim.AdamW) == ("torch_adamw" in kind)
    assert sum(step.num_chunks for step in state_of(worker).steps) > 8
    delay(monkeypatch, seconds=0.001)
    assert run_steps(worker, 20, visit_phases=True) == plain


@pytest.mark.whole_gpu
def test_the_gpu_never_holds_more_of_it_than_the_window(make_worker, monkeypatch):
    """Checks the build of the optimizer, the creation of its state, and a step."""

    resident = make_worker(streaming_policy("precision_aware", monkeypatch, streamed=False))
    resident.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
    resident_sizes = resident.offloader.nbytes()
    resident.shutdown()
    gc.collect()  # models are reference cycles
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    worker = make_worker(streaming_policy("precision_aware", monkeypatch))
    for _ in range(2):
        worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
    peak, sizes = torch.cuda.max_memory_allocated() - before, worker.offloader.nbytes()
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
    worker = make_worker(streaming_policy(kind, monkeypatch, streamed=False))
    run_steps(worker, 2, visit_phases=False)
    save(worker, tmp_path / "resident")
    wanted = run_steps(worker, 2, visit_phases=False)
    worker = make_worker(streaming_policy(kind, monkeypatch))
    run_steps(worker, 2, visit_phases=True)
    save(worker, tmp_path / "streamed")
    assert differing(checkpoint_entries(tmp_path / "resident"), checkpoint_entries(tmp_path / "streamed")) == []
    run_steps(worker, 1, visit_phases=False)
    worker.load_checkpoint(str(tmp_path / "resident"))
    assert run_steps(worker, 2, visit_phases=True) == wanted
    worker = make_worker(streaming_policy(kind, monkeypatch, streamed=False))
    worker.load_checkpoint(str(tmp_path / "streamed"))
    assert run_steps(worker, 2, visit_phases=True) == wanted


def test_staging_carries_what_cannot_be_page_locked_in_streamed_steps(make_worker, monkeypatch):
    plain = run_steps(make_worker(streaming_policy("fused_adam", monkeypatch, streamed=False)), 3, visit_phases=False)
    refuse_page_locks(monkeypatch)
    worker = make_worker(streaming_policy("fused_adam", monkeypatch, verify=True))
    assert worker.offloader.context.arena.pinned_bytes == 0
    assert run_steps(worker, 3, visit_phases=True) == plain


@pytest.mark.whole_gpu
def test_no_room_for_the_window_is_said_at_the_start(make_worker, monkeypatch):
    policy = streaming_policy("fused_adam", monkeypatch)
    policy["residency"]["stream_window_mib"] = torch.cuda.mem_get_info()[1] // MIB
    with pytest.raises(OutOfGpuMemoryError, match=r"Cannot allocate the window .*policy\.residency\.stream_window_mib"):
        make_worker(policy)
    make_worker(streaming_policy("fused_adam", monkeypatch))
