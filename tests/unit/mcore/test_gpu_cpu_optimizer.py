"""Tests the CPU optimizer on a CUDA GPU: late copies, and checkpoints between all ways to keep the state."""

import pytest
import torch
from support.gpu import EXACTLY, SHAPE, refuse_page_locks
from support.phases import checksums, delay_moves, run_steps
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, tiny_policy

from nemo_offload_rl.mcore.checkpoint.optimizer_loading import join_masters
from nemo_offload_rl.mcore.optimizer.cpu_optimizer import cpu_optimizers
from nemo_offload_rl.residency.table import Target

pytestmark = EXACTLY

# Fraction, and whether the optimizer is precision-aware.
WAYS = {
    "fused_adam": (None, False),
    "precision_aware": (None, True),
    "half": (0.5, True),
    "whole": (1.0, True),
    "half, masters on the GPU": (0.5, False),
}


def policy_of(way, kind="", *, overlap=True, precision="bfloat16", **optimizer):
    fraction, aware = WAYS[way]
    policy = tiny_policy((TINY_QWEN3_MOE if kind == "moe" else TINY_QWEN3) | SHAPE, precision)
    policy["megatron_cfg"]["optimizer"] |= {"use_precision_aware_optimizer": aware, **optimizer}
    if fraction:
        policy["megatron_cfg"]["optimizer"] |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": fraction,
            "overlap_cpu_optimizer_d2h_h2d": overlap,
        }
    return policy


def offloading(policy, *, verify=True):
    policy["residency"] |= {"verify": verify, "huge_pages": False, "host_memory_limit_gib": None, "table": None}
    return policy


def masters(worker):
    """Returns each parameter's float32 master, from the bits that its optimizer keeps; in the order of its groups."""
    found = []
    for part in worker.state.optimizer.chained_optimizers:
        for param in (param for group in part.optimizer.param_groups for param in group["params"]):
            kept = part.optimizer.state[param].get("master_param", param)
            kept = join_masters(param, kept) if kept.dtype is torch.int16 else kept
            found.append(kept.detach().float().cpu().clone())
    return found


@pytest.mark.parametrize("kind", ["", "moe"])
@pytest.mark.parametrize("way", ["half", "whole", "half, masters on the GPU"])
def test_late_copies_and_phases_change_no_number(make_worker, monkeypatch, way, kind):
    """Late gradients would be the step before's; late parameters would show in the next step."""
    plain = run_steps(make_worker(policy_of(way, kind)), 6, visit_phases=False)
    assert run_steps(make_worker(policy_of(way, kind, overlap=False)), 6, visit_phases=False) == plain
    monkeypatch.setattr("nemo_offload_rl.mcore.optimizer.cpu_optimizer._PART", 100_000)
    monkeypatch.setattr("nemo_offload_rl.mcore.optimizer.cpu_optimizer_state.PIECE", 300_000)
    worker = make_worker(offloading(policy_of(way, kind)))
    assert all(len(one.cpu_optimizers) > 3 for one in cpu_optimizers(worker.state.optimizer))
    delay_moves(monkeypatch)
    assert run_steps(worker, 6, visit_phases=True) == plain


def test_where_everything_is(make_worker):
    worker = make_worker(offloading(policy_of("half"), verify=False))
    (optimizer,) = cpu_optimizers(worker.state.optimizer)
    count = sum(p.numel() for _, p in worker.state.parameters())
    assert worker.offloader.nbytes()[Target.OPTIMIZER_STATE] == pytest.approx(
        12 * (count - optimizer.num_on_cpu), rel=0.02
    )
    on_cpu = [entry for part in optimizer._parts for entry in part.params]
    assert all(entry.master.tensor.device.type == entry.grad.tensor.device.type == "cpu" for entry in on_cpu)
    assert all(entry.master.tensor.is_pinned() for entry in on_cpu)
    run_steps(worker, 2, visit_phases=True)
    worker.offload_after_refit()
    assert worker.offloader.mapped_bytes == 0
    assert worker.offloader.context.arena.pinned_bytes >= optimizer.host_bytes


@pytest.mark.parametrize("way", ["half", "whole", "half, masters on the GPU"])
def test_a_resumed_run_continues_bit_for_bit(make_worker, tmp_path, way):
    worker = make_worker(offloading(policy_of(way)))
    run_steps(worker, 3, visit_phases=True)
    worker.offload_after_refit()
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    want = run_steps(worker, 3, visit_phases=True)
    worker = make_worker(policy_of(way), seed=99)
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert run_steps(worker, 3, visit_phases=False) == want


@pytest.mark.parametrize("source", WAYS)
def test_every_way_loads_the_same_masters_from_every_other(make_worker, tmp_path, source):
    worker = make_worker(policy_of(source))
    run_steps(worker, 3, visit_phases=False)
    want, bits = masters(worker), checksums(worker)
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    losses = {}
    for way in WAYS:
        worker = make_worker(policy_of(way), seed=99)
        worker.load_checkpoint(str(tmp_path / "policy"))
        got = masters(worker)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True)), way
        # Only Transformer Engine rounds halves up, so parameters may differ only in those.
        assert "precision_aware" in (way, source) or checksums(worker) == bits
        losses[way] = run_steps(worker, 2, visit_phases=False)[-1]["loss"]
    assert max(losses.values()) - min(losses.values()) < 0.05, losses


def test_host_memory_that_cannot_be_page_locked_changes_no_number(make_worker, monkeypatch):
    plain = run_steps(make_worker(policy_of("half")), 3, visit_phases=False)
    refuse_page_locks(monkeypatch)
    worker = make_worker(policy_of("half"))
    (optimizer,) = cpu_optimizers(worker.state.optimizer)
    assert not optimizer._parts[0].params[0].master.tensor.is_pinned()
    assert run_steps(worker, 3, visit_phases=False) == plain
