"""Tests that a run resumes between all ways to keep optimizer state, with the hyperparameters of its own recipe."""

import math
from pathlib import Path

import pytest
import torch
from support.late_streams import LateStream
from support.phases import checkpoint_entries, differing, run_steps, save
from support.tiny import tiny_policy
from torch.distributed.checkpoint import FileSystemReader

from nemo_offload_rl.mcore.build import make_scheduler
from nemo_offload_rl.mcore.checkpoint import optimizer_loading
from nemo_offload_rl.mcore.checkpoint.optimizer_loading import join_masters, require_same_schedule, split_masters
from nemo_offload_rl.mcore.optimizer.cpu_optimizer import cpu_optimizers
from nemo_offload_rl.residency.streamed import window
from nemo_offload_rl.residency.table import Phase
from tests.unit.mcore import test_cpu_optimizer as on_cpu
from tests.unit.mcore import test_streamed_state as streamed

PINNED, PAGEABLE = {"use_pinned_optimizer_offload": True}, {"use_pinned_optimizer_offload": False}
STAYS = {"offload_optimizer_for_refit": False}


@pytest.fixture(autouse=True)
def _late_copies(monkeypatch):
    monkeypatch.setattr(window, "CopyStream", LateStream)


WAYS = ["resident", "streamed", "undistributed", "streamed undistributed", "fp32 undistributed", 0.5, 1.0, "on the GPU"]
"""To keep optimizer state; a number is the fraction on the CPU, and `on the GPU` half of it, without its masters."""


def policy_of(way, kind="bfloat16"):
    if way in ("on the GPU", 0.3, 0.5, 1.0):
        aware = way != "on the GPU"
        return on_cpu.offloading(on_cpu.policy_of(way if aware else 0.5, kind, aware=aware))
    return streamed.policy_of(f"{kind.replace('float', 'fp')} {way}", streamed="streamed" in way)


def saved_state(folder):
    """Returns weights, masters and moments; not the groups, in which the optimizers differ."""
    return {name: data for name, data in checkpoint_entries(folder).items() if "shard_0_1" not in name}


PAIRS = [
    ("streamed", "bfloat16", ["resident", 0.5, 1.0]), ("resident", "bfloat16", [0.5, 1.0, "on the GPU"]),
    (0.3, "bfloat16", ["streamed", 1.0]), (0.5, "bfloat16", ["resident", "on the GPU"]),
    (1.0, "bfloat16", ["streamed", "resident", 0.5]), (0.5, "moe bfloat16", ["streamed"]),
    (0.5, "float32", ["streamed"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "kind", "ways"), PAIRS)
def test_a_checkpoint_of_one_way_is_trained_on_in_the_others(make_worker, tmp_path, source, kind, ways):
    worker = make_worker(policy_of(source, kind))
    run_steps(worker, 2, visit_phases=True)
    save(worker, tmp_path / "source")
    saved, want = saved_state(tmp_path / "source"), run_steps(worker, 2, visit_phases=True)
    for way in ways:
        worker = make_worker(policy_of(way, kind), seed=99)
        run_steps(worker, 1, visit_phases=False)  # loading must replace its counts and moments
        worker.load_checkpoint(str(tmp_path / "source"))
        save(worker, tmp_path / str(way))
        assert differing(saved, saved_state(tmp_path / str(way))) == [], way
        got = run_steps(worker, 2, visit_phases=True)
        if {way, source} == {"resident", "streamed"}:
            assert got == want, way
        # One side clips gradients in bf16, and with AVX-512 Adam's kernel on the CPU rounds otherwise than the one for
        # the rest. A step count of 0 would make a difference of 0.016.
        assert [one["loss"] for one in got] == pytest.approx([one["loss"] for one in want], abs=1e-3), way


SHARES = [(0.5, "moe bfloat16", PAGEABLE), (0.5, "float32", PAGEABLE), (1.0, "bfloat16", PINNED)]


@pytest.mark.parametrize(("fraction", "kind", "here"), SHARES)
def test_the_cpu_optimizer_resumes_bit_for_bit_from_every_phase(make_worker, tmp_path, fraction, kind, here):
    worker = make_worker(policy_of(fraction, kind) | here)
    run_steps(worker, 2, visit_phases=True)
    for phase in Phase:
        worker.residency.enter(phase)
        save(worker, tmp_path / phase)
    want = run_steps(worker, 2, visit_phases=True)
    saved = checkpoint_entries(tmp_path / Phase.TRAIN)
    for phase, there in zip(Phase, (PAGEABLE, PINNED, STAYS, PAGEABLE), strict=True):
        assert differing(checkpoint_entries(tmp_path / phase), saved) == []
        worker = make_worker(policy_of(fraction, kind) | there, seed=99)
        worker.load_checkpoint(str(tmp_path / phase))
        assert {one.num_steps for one in cpu_optimizers(worker.state.optimizer)} == {2}
        assert run_steps(worker, 2, visit_phases=True) == want, phase


def test_remainders_of_masters_are_read(make_worker, tmp_path, monkeypatch):
    """Transformer Engine's precision-aware Adam saves masters so; test_gpu_cpu_optimizer.py tests it."""
    worker = make_worker(policy_of(0.5))
    run_steps(worker, 2, visit_phases=False)
    (optimizer,) = cpu_optimizers(worker.state.optimizer)
    masters = {id(state["master_param"]): (param, state["master_param"]) for param, state in optimizer.state.items()}
    want = {id(param): master.clone() for param, master in masters.values()}

    def as_remainders(tensor):
        if id(tensor) not in masters:
            return tensor
        param, master = masters[id(tensor)]
        return split_masters(master, param)

    monkeypatch.setattr(type(worker.offloader), "checkpoint_reader", lambda _: as_remainders)
    save(worker, tmp_path / "policy")
    monkeypatch.undo()
    saved = FileSystemReader(str(tmp_path / "policy")).read_metadata().state_dict_metadata
    assert {entry.properties.dtype for name, entry in saved.items() if name.endswith(".param")} == {torch.int16}
    params = list(optimizer.state)
    with torch.no_grad():
        for _, master in masters.values():
            master.zero_()
    worker.load_checkpoint(str(tmp_path / "policy"))
    for param in params:
        assert torch.equal(optimizer.state[param]["master_param"], want[id(param)])


def every_upper_half():
    """Returns float32 of every finite bf16's sign, exponent and mantissa, each with lower halves around the middle."""
    high = torch.arange(2**16, dtype=torch.int32)
    high = high[(high & 0x7F80) != 0x7F80]
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return ((high[:, None] << 16) | lows).flatten().view(torch.float32)


def test_remainders_and_parameters_give_back_every_bit(monkeypatch):
    monkeypatch.setattr(optimizer_loading, "_PIECE", 100_000)
    masters = every_upper_half()
    params = torch.empty(masters.shape, dtype=torch.bfloat16)
    remainders = split_masters(masters, params)
    assert remainders.dtype is torch.int16
    assert torch.equal(join_masters(params, remainders).view(torch.int32), masters.view(torch.int32))
    rounded = masters.bfloat16()
    differ = params.view(torch.int16) != rounded.view(torch.int16)
    assert (masters.view(torch.int32)[differ] & 0xFFFF == 0x8000).all()  # ties: rounded up there, to even elsewhere
    assert differ.sum() == every_upper_half().numel() // 6 // 2


def test_remainders_are_what_the_arithmetic_of_transformer_engine_makes_of_a_master():
    """Repeats its kernel by hand: the upper 16 bits, plus one if the lower ones begin with 1; and the lower ones."""
    master = torch.tensor([0x3F80_8000, 0x3F80_7FFF, 0x3F81_8000], dtype=torch.int32).view(torch.float32)
    params = torch.empty(3, dtype=torch.bfloat16)
    assert split_masters(master, params).tolist() == [-32768, 32767, -32768]
    assert params.view(torch.int16).tolist() == [0x3F81, 0x3F80, 0x3F82]


OTHER = {"adam_beta1": 0.5, "adam_beta2": 0.7, "adam_eps": 1e-3, "weight_decay": 0.3}


def changed(policy, schedule=None, **optimizer):
    cfg = policy["megatron_cfg"]
    weight_decay = optimizer.get("weight_decay", cfg["optimizer"]["weight_decay"])
    cfg["optimizer"] |= optimizer
    cfg["scheduler"] |= {"start_weight_decay": weight_decay, "end_weight_decay": weight_decay} | (schedule or {})
    return policy


def saved_after_two_steps(make_worker, policy, folder):
    worker = make_worker(policy)
    run_steps(worker, 2, visit_phases=True)
    worker.save_checkpoint(str(folder), save_optimizer=True)


def learning_rate(worker):
    (rate,) = {group["lr"] for group in worker.state.optimizer.param_groups}
    return rate


def cosine(step, num_steps, lr, min_lr):
    """Returns the learning rate of a cosine schedule with a warm-up of two steps, after `step` steps."""
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * (step - 2) / (num_steps - 2)))


@pytest.mark.parametrize("way", WAYS)
def test_another_learning_rate_and_other_hyperparameters_apply(make_worker, tmp_path, way):
    saved_after_two_steps(make_worker, policy_of(way), tmp_path)
    linear = {"lr_decay_style": "linear", "lr_decay_iters": 6}
    policy = changed(policy_of(way), linear, lr=5e-3, min_lr=1e-3, **OTHER)
    worker = make_worker(policy, seed=99)
    worker.load_checkpoint(str(tmp_path))
    assert worker.state.scheduler.num_steps == 2
    rates = []
    for _ in range(3):
        rates.append(learning_rate(worker))
        run_steps(worker, 1, visit_phases=True)
    assert rates == pytest.approx([5e-3, 4e-3, 3e-3])
    groups = worker.state.optimizer.param_groups
    ((*found,),) = {(group["max_lr"], group["min_lr"], *group["betas"], group["eps"]) for group in groups}
    assert found == [5e-3, 1e-3, 0.5, 0.7, 1e-3]
    assert {group["weight_decay"] for group in groups} == {0.3, 0.0}  # none for one-dimensional parameters


@pytest.mark.parametrize("ways", [("resident", "streamed"), ("undistributed", "streamed undistributed")])
def test_streamed_state_takes_the_same_steps_with_them_as_resident_state(make_worker, tmp_path, ways):
    saved_after_two_steps(make_worker, policy_of(ways[0]), tmp_path)
    steps = []
    for way in ways:
        for values in ({}, {"lr": 5e-3, **OTHER}):
            worker = make_worker(changed(policy_of(way), **values), seed=99)
            worker.load_checkpoint(str(tmp_path))
            steps.append(run_steps(worker, 3, visit_phases=True))
    assert steps[:2] == steps[2:]
    assert steps[0] != steps[1]


def test_an_extended_cosine_schedule_continues_with_its_new_length(make_worker, tmp_path):
    policy = changed(policy_of("resident"), {"lr_decay_style": "cosine", "lr_decay_iters": 4}, min_lr=1e-4)
    worker = make_worker(policy)
    run_steps(worker, 4, visit_phases=False)
    assert learning_rate(worker) == pytest.approx(1e-4)
    worker.save_checkpoint(str(tmp_path), save_optimizer=True)
    worker = make_worker(changed(policy, {"lr_decay_iters": 10}), seed=99)
    worker.load_checkpoint(str(tmp_path))
    for step in range(4, 7):
        assert learning_rate(worker) == pytest.approx(cosine(step, 10, 1e-3, 1e-4))
        run_steps(worker, 1, visit_phases=False)


CHANGES = [
    ({"lr": 5e-3}, "optimizer.lr is 0.005 (there 0.001)"),
    ({"min_lr": 1e-5}, "optimizer.min_lr is "),
    ({"schedule": {"lr_warmup_iters": 1}}, "scheduler.lr_warmup_iters is "),
    ({"schedule": {"lr_decay_iters": 9}}, "scheduler.lr_decay_iters "),
    ({"schedule": {"lr_decay_style": "cosine"}}, "scheduler.lr_decay_style is cosine"),
    ({"weight_decay": 0.5}, "scheduler.start_weight_decay is 0.5"),
    ({"schedule": {"end_weight_decay": 0.5, "weight_decay_incr_style": "linear"}}, "scheduler.end_weight_decay is"),
    ({"schedule": {"run_length": 77}}, "the run's number of training steps"),
]


@pytest.mark.parametrize(("change", "key"), CHANGES, ids=str)
def test_what_megatron_core_asserts_is_refused_by_key_unless_overridden(change, key):
    """With false, megatron-core resumes only a schedule all of whose values are equal (`_check_and_set`)."""

    def schedule(*, override, schedule=None, **optimizer):
        own = {"override_opt_param_scheduler": override, **(schedule or {})}
        groups = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        return make_scheduler(changed(tiny_policy(), own, **optimizer), groups)

    saved = schedule(override=False).state_dict()
    other = schedule(override=False, **change)
    with pytest.raises(ValueError, match="override_opt_param_scheduler is false: ") as caught:
        require_same_schedule(other, saved, Path("step_2"))
    assert key in str(caught.value)
    with pytest.raises(AssertionError, match="do not match"):
        other.load_state_dict(saved)
    for same in (schedule(override=True, **change), schedule(override=False)):
        require_same_schedule(same, saved, Path("step_2"))
        own = same.state_dict()
        same.load_state_dict(saved)
        assert same.state_dict() == own


def test_another_schedule_and_other_groups_of_parameters_are_refused_in_a_sentence(make_worker, tmp_path):
    saved_after_two_steps(make_worker, policy_of("resident"), tmp_path)
    strict = {"override_opt_param_scheduler": False}
    for schedule, optimizer, words in (
        (strict, {"lr": 5e-3}, r"optimizer\.lr is 0\.005 \(there 0\.001\); set that to true"),
        ({}, {"decoupled_lr": 1e-2}, "cannot be resumed: its optimizer has other groups .*decoupled_lr"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            make_worker(changed(policy_of("resident"), schedule, **optimizer)).load_checkpoint(str(tmp_path))
        assert "\n" not in str(caught.value)
    worker = make_worker(changed(policy_of("resident"), strict), seed=99)
    worker.load_checkpoint(str(tmp_path))
    assert worker.state.scheduler.num_steps == 2
    saved_after_two_steps(make_worker, changed(policy_of("resident"), decoupled_lr=1e-2), tmp_path / "decoupled")
    worker = make_worker(changed(policy_of("resident"), decoupled_lr=2e-2, lr=4e-3))
    worker.load_checkpoint(str(tmp_path / "decoupled"))
    assert {group["max_lr"] for group in worker.state.optimizer.param_groups} == {2e-2, 4e-3}
