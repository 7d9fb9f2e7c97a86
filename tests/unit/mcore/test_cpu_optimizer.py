"""Tests the CPU optimizer under a worker with all tensors on the CPU; test_gpu_cpu_optimizer.py uses a GPU."""

import os
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from safetensors.torch import load_file
from support.metrics_page import undocumented
from support.phases import assert_ends, run_steps
from support.ranks import run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, tiny_policy

from nemo_offload_rl.mcore.optimizer.cpu_optimizer import cpu_optimizers, take_host_memory
from nemo_offload_rl.mcore.optimizer.cpu_optimizer_state import largest_within
from nemo_offload_rl.mcore.optimizer.init_optimizer_state import init_optimizer_state
from nemo_offload_rl.mcore.patches.optimizers import build_optimizer, reload_masters
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.residency.table import Target
from tests.unit.mcore.test_hf_weights import folder_without


def policy_of(fraction, kind="bfloat16", *, aware=True, **optimizer):
    if fraction:
        offloaded = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
        offloaded |= {"overlap_cpu_optimizer_d2h_h2d": True, "use_precision_aware_optimizer": aware}
        optimizer = offloaded | optimizer
    return tiny_policy(TINY_QWEN3_MOE if "moe" in kind else TINY_QWEN3, kind.split()[-1], optimizer=optimizer)


def offloading(policy):
    policy["residency"] |= {"verify": True, "huge_pages": False}
    return policy


def masters(worker):
    """Returns each parameter of megatron-core's optimizers with its float32 copies, on the CPU and on the GPU."""
    for optimizer in cpu_optimizers(worker.state.optimizer):
        for part in optimizer._parts:
            yield from ((entry.param, entry.master.tensor) for entry in part.params)
        yield from optimizer._on_gpu


def steps(worker, count=3):
    return run_steps(worker, count, visit_phases=False)


def test_the_largest_parameters_that_fit_make_up_the_fraction():
    assert largest_within([10, 60, 30], 0.5) == {2, 0}
    assert largest_within([10, 60, 30], 1.0) == {0, 1, 2}
    assert largest_within([10, 60, 30], 0.05) == set()


SHARES = [(0.3, "bfloat16"), (0.5, "float32"), (0.5, "moe bfloat16"), (1.0, "bfloat16")]


@pytest.mark.parametrize(("fraction", "kind"), SHARES)
def test_every_master_equals_the_model_from_the_start_and_after_each_step(make_worker, fraction, kind):
    worker = make_worker(policy_of(fraction, kind))
    for _ in range(2):
        pairs = list(masters(worker))
        assert len(pairs) == len(list(worker.state.parameters()))
        for param, master in pairs:
            assert torch.equal(param, master.to(param.dtype))
        steps(worker, 1)
    on_cpu = sum(optimizer.num_on_cpu for optimizer in cpu_optimizers(worker.state.optimizer))
    assert 0.8 * fraction <= on_cpu / sum(p.numel() for _, p in worker.state.parameters()) <= fraction


@pytest.mark.parametrize(("fraction", "aware"), [(0.3, True), (0.5, True), (1.0, True), (0.5, False), (1.0, False)])
def test_every_fp32_copy_equals_a_model_that_was_loaded_from_a_folder(make_worker, tmp_path, fraction, aware):
    loaded = folder_without(None, TINY_QWEN3, tmp_path)
    policy = policy_of(fraction, aware=aware) | {key: loaded[key] for key in ("hf_config", "model_name")}
    worker, saved = make_worker(policy), load_file(tmp_path / "model.safetensors")
    for name, weight in worker.hf_weights():
        assert torch.equal(weight, saved[name].bfloat16()), name
    pairs = list(masters(worker))
    assert len(pairs) == len(list(worker.state.parameters()))
    assert all(torch.equal(param.float(), master) for param, master in pairs)
    (part,) = worker.state.optimizer.chained_optimizers
    groups = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
    of_core = [pair for params, found in groups for pair in zip(params, found, strict=True) if pair[1] is not None]
    assert len(of_core) == (0 if aware else len(pairs))  # megatron-core's own copies; `pairs` has the model's
    assert all(torch.equal(param.view(-1).float(), master) for param, master in of_core)


@pytest.mark.parametrize("aware", [True, False])
def test_weights_loaded_apart_from_a_step_reach_every_master(make_worker, aware):
    worker = make_worker(policy_of(0.5, aware=aware))
    with torch.no_grad():
        for _, param in worker.state.parameters():
            param.mul_(2)
    reload_masters(worker.state.optimizer)
    for param, master in masters(worker):
        assert torch.equal(param.float(), master)
    before = [param.clone() for _, param in worker.state.parameters()]
    steps(worker, 1)
    for (name, param), was in zip(worker.state.parameters(), before, strict=True):
        torch.testing.assert_close(param, was, rtol=0.02, atol=0.01, msg=name)


def test_numbers_are_those_of_the_resident_optimizer_but_for_the_last_bits(make_worker):
    """torch's kernels round differently, and the precision-aware optimizer clips gradients in bf16."""
    want = steps(make_worker(policy_of(None)))
    for fraction, aware, tolerance in ((1.0, False, 1e-5), (0.5, True, 1e-3)):
        for one, other in zip(steps(make_worker(policy_of(fraction, aware=aware))), want, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=tolerance)


def test_parts_and_the_whole_are_equal(make_worker, monkeypatch):
    whole = steps(make_worker(policy_of(1.0, overlap_cpu_optimizer_d2h_h2d=False)))
    monkeypatch.setattr("nemo_offload_rl.mcore.optimizer.cpu_optimizer._PART", 10_000)
    monkeypatch.setattr("nemo_offload_rl.mcore.optimizer.cpu_optimizer_state.PIECE", 1000)
    worker = make_worker(policy_of(1.0))
    (optimizer,) = cpu_optimizers(worker.state.optimizer)
    assert len(optimizer.cpu_optimizers) > 3
    assert steps(worker) == whole


@pytest.mark.parametrize(("fraction", "aware"), [(0.5, True), (1.0, True), (1.0, False)])
def test_phases_move_the_gpus_share_alone(make_worker, fraction, aware):
    plain = run_steps(make_worker(policy_of(fraction, aware=aware)), 4, visit_phases=False)
    worker = make_worker(offloading(policy_of(fraction, aware=aware)))
    (optimizer,) = cpu_optimizers(worker.state.optimizer)
    count = sum(p.numel() for _, p in worker.state.parameters())
    nbytes = 12 * (count - optimizer.num_on_cpu) if aware else 4 * count  # masters that megatron-core keeps on the GPU
    assert worker.offloader.nbytes()[Target.OPTIMIZER_STATE] == pytest.approx(nbytes, rel=0.02)
    assert worker.offloader.context.arena.allocated_bytes >= optimizer.host_bytes > 0

    def places() -> list[tuple[int, int]]:
        return [(entry.master.tensor.data_ptr(), entry.grad.tensor.data_ptr()) for entry in optimizer._parts[0].params]

    before = places()
    assert run_steps(worker, 4, visit_phases=True) == plain
    worker.offload_after_refit()
    assert worker.offloader.mapped_bytes == 0
    assert places() == before
    assert_ends(worker)


def test_sgd_is_stepped_there_too(make_worker):
    sgd = {"optimizer": "sgd", "sgd_momentum": 0.9}
    got = steps(make_worker(policy_of(0.5, aware=False, **sgd)))
    want = steps(make_worker(policy_of(None, **sgd, use_distributed_optimizer=False)))
    assert [one["checksums"] for one in got] == [one["checksums"] for one in want]


def test_its_host_memory_is_in_the_budget_before_any_is_taken(make_worker):
    policy = offloading(policy_of(1.0))
    policy["residency"]["host_memory_limit_gib"] = 2.0 / 1024
    before = PinnedArena.live_bytes()
    with pytest.raises(HostBudgetError, match="cpu_optimizer") as caught:
        make_worker(policy)
    assert PinnedArena.live_bytes() == before
    assert "policy.megatron_cfg.optimizer.optimizer_offload_fraction" in str(caught.value)


def test_metrics_have_seconds_and_bytes_of_the_last_step(make_worker):
    worker = make_worker(policy_of(1.0))
    steps(worker, 1)
    metrics = {name: value for name, value in worker.residency_metrics().items() if name.startswith("cpu_optimizer/")}
    count = sum(p.numel() for _, p in worker.state.parameters())
    assert metrics["cpu_optimizer/copied_gib"] == 4 * count / 2**30
    assert metrics["cpu_optimizer/host_gib"] == pytest.approx(16 * count / 2**30, rel=0.02)
    assert metrics["cpu_optimizer/step_s"] > metrics["cpu_optimizer/waited_s"] > 0
    assert undocumented(f"residency/{name}" for name in metrics) == []


def test_no_gradient_outlives_the_phase_that_made_it(make_worker):
    worker = make_worker(offloading(policy_of(0.5, aware=False)))
    steps(worker, 1)
    worker.prepare_for_lp_inference()
    (optimizer,) = cpu_optimizers(worker.state.optimizer)
    assert all(param.grad is None for group in optimizer.param_groups for param in group["params"])


def resumed_on_two_ranks(rank, world_size, ports):
    """Trains, saves and resumes with half of each rank's shards on the CPU, of dense parameters and of experts."""
    folder, reports = os.environ["SAVE_BELOW"], []
    for port in ports:
        policy = policy_of(0.5, "moe bfloat16")
        policy["megatron_cfg"]["expert_model_parallel_size"] = 2
        worker = worker_of_rank(policy, rank, world_size, port)
        if reports:
            worker.load_checkpoint(folder)
        else:
            run_steps(worker, 2, visit_phases=True)
            worker.save_checkpoint(folder, save_optimizer=True)
        found = list(cpu_optimizers(worker.state.optimizer))
        shares = [(one.num_on_cpu, sum(param.numel() for param, _ in one._on_gpu)) for one in found]
        reports.append(run_steps(worker, 2, visit_phases=True))
        worker.shutdown()
    return shares, reports


@pytest.mark.slow
def test_two_ranks_step_halves_of_their_shards_and_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_BELOW", str(tmp_path))
    for shares, (want, got) in run_ranks(resumed_on_two_ranks, 2, num_ports=2):
        assert len(shares) == 2
        assert all(0.3 < on_cpu / (on_cpu + on_gpu) <= 0.5 for on_cpu, on_gpu in shares), shares
        assert got == want


def test_each_optimizer_inside_of_another_gets_its_state():
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    inside = [torch.optim.AdamW([parameter]) for parameter in parameters]
    hybrid = SimpleNamespace(sub_optimizers=inside)  # as in megatron-core's HybridDeviceOptimizer
    init_optimizer_state(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=hybrid)]))
    for parameter, adam in zip(parameters, inside, strict=True):
        assert set(adam.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
        assert adam.state[parameter]["exp_avg"].dtype is parameter.dtype


def test_the_learning_rate_reaches_every_optimizer_without_a_schedule(make_worker):
    worker = make_worker(policy_of(0.5))
    config = OptimizerConfig(
        optimizer="adam", lr=0.25, bf16=True, use_distributed_optimizer=True, use_precision_aware_optimizer=True,
        optimizer_cpu_offload=True, optimizer_offload_fraction=0.5,
    )  # fmt: skip
    optimizer = build_optimizer(config, worker.state.model)
    (inner,) = cpu_optimizers(optimizer)
    with PinnedArena() as arena:
        give_back = take_host_memory([inner], arena)
        for group in inner.param_groups:
            for param in group["params"]:
                param.decoupled_grad = torch.ones_like(param)
        inner.step()
        assert len(inner.sub_optimizers) == 2
        assert {group["lr"] for one in inner.sub_optimizers for group in one.param_groups} == {0.25}
        inner.param_groups[0]["lr"] = 0.125
        inner.step()
        assert {group["lr"] for one in inner.sub_optimizers for group in one.param_groups} == {0.125, 0.25}
        inner.param_groups[0]["lr"] = None
        with pytest.raises(ValueError, match=r"has no learning rate; give one in OptimizerConfig\.lr"):
            inner.step()
        give_back()


@pytest.mark.parametrize("kind", ["RMSprop", "SGD"])
def test_state_whose_first_step_does_not_start_from_zeros_is_left_to_that(kind):
    options = {"momentum": 0.9} | ({"dampening": 0.5} if kind == "SGD" else {})

    def stepped(prepare):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, **options)
        prepare(optimizer)
        for scale in (1, 2):
            parameter.grad = torch.full((3,), float(scale))
            optimizer.step()
        return parameter.tolist()

    assert stepped(init_optimizer_state) == stepped(lambda _: None)
