"""Tests that a resumed run has the hyperparameters of its own recipe, however optimizer state is kept."""

import math
from pathlib import Path

import pytest
import torch
from support.late_streams import LateStream
from support.phases import run_steps
from support.tiny import tiny_policy

from nemo_offload_rl.mcore.build import make_scheduler
from nemo_offload_rl.mcore.checkpoint.optimizer_loading import require_same_schedule
from nemo_offload_rl.residency.streamed import window
from tests.unit.mcore import test_cpu_optimizer as on_cpu
from tests.unit.mcore import test_streamed_state as streamed

OTHER = {"adam_beta1": 0.5, "adam_beta2": 0.7, "adam_eps": 1e-3, "weight_decay": 0.3}
WAYS = {
    "resident": lambda: streamed.policy_of("bf16", streamed=False),
    "streamed": lambda: streamed.policy_of("bf16"),
    "undistributed": lambda: streamed.policy_of("bf16 undistributed", streamed=False),
    "streamed undistributed": lambda: streamed.policy_of("bf16 undistributed"),
    "float32": lambda: streamed.policy_of("fp32 undistributed", streamed=False),
    "on the CPU": lambda: on_cpu.offloading(on_cpu.policy_of(1.0)),
    "half on the CPU": lambda: on_cpu.offloading(on_cpu.policy_of(0.5, "moe bfloat16")),
    "masters on the GPU": lambda: on_cpu.offloading(on_cpu.policy_of(0.5, aware=False)),
}


@pytest.fixture(autouse=True)
def _late_copies(monkeypatch):
    monkeypatch.setattr(window, "CopyStream", LateStream)


def changed(policy, schedule=None, **optimizer):
    """Returns a policy with other values of the optimizer and its schedule."""
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
    """Returns the learning rate of the next step."""
    (rate,) = {group["lr"] for group in worker.state.optimizer.param_groups}
    return rate


def cosine(step, num_steps, lr, min_lr):
    """Returns the learning rate of a cosine schedule with a warm-up of two steps, after `step` steps."""
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * (step - 2) / (num_steps - 2)))


@pytest.mark.parametrize("way", WAYS)
def test_another_learning_rate_and_other_hyperparameters_apply(make_worker, tmp_path, way):
    saved_after_two_steps(make_worker, WAYS[way](), tmp_path)
    linear = {"lr_decay_style": "linear", "lr_decay_iters": 6}
    policy = changed(WAYS[way](), linear, lr=5e-3, min_lr=1e-3, **OTHER)
    worker = make_worker(policy, seed=99)
    worker.load_checkpoint(str(tmp_path))
    assert worker.state.scheduler.num_steps == 2
    rates = []
    for _ in range(3):
        rates.append(learning_rate(worker))
        run_steps(worker, 1, visit_phases=True)
    assert rates == pytest.approx([5e-3, 4e-3, 3e-3])
    groups = worker.state.optimizer.param_groups
    assert {(group["max_lr"], group["min_lr"], *group["betas"], group["eps"]) for group in groups} == {
        (5e-3, 1e-3, 0.5, 0.7, 1e-3)
    }
    assert {group["weight_decay"] for group in groups} == {0.3, 0.0}  # none for one-dimensional parameters


@pytest.mark.parametrize("kind", ["", " undistributed"])
def test_streamed_state_takes_the_same_steps_with_them_as_resident_state(make_worker, tmp_path, kind):
    resident = WAYS[kind.strip() or "resident"]
    saved_after_two_steps(make_worker, resident(), tmp_path)
    steps = []
    for make_policy in (resident, WAYS[f"streamed{kind}"]):
        for values in ({}, {"lr": 5e-3, **OTHER}):
            worker = make_worker(changed(make_policy(), **values), seed=99)
            worker.load_checkpoint(str(tmp_path))
            steps.append(run_steps(worker, 3, visit_phases=True))
    assert steps[:2] == steps[2:]
    assert steps[0] != steps[1]


def test_an_extended_cosine_schedule_continues_with_its_new_length(make_worker, tmp_path):
    policy = changed(WAYS["resident"](), {"lr_decay_style": "cosine", "lr_decay_iters": 4}, min_lr=1e-4)
    worker = make_worker(policy)
    run_steps(worker, 4, visit_phases=False)
    assert learning_rate(worker) == pytest.approx(1e-4)
    worker.save_checkpoint(str(tmp_path), save_optimizer=True)
    worker = make_worker(changed(policy, {"lr_decay_iters": 10}), seed=99)
    worker.load_checkpoint(str(tmp_path))
    for step in range(4, 7):
        assert learning_rate(worker) == pytest.approx(cosine(step, 10, 1e-3, 1e-4))
        run_steps(worker, 1, visit_phases=False)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"lr": 5e-3}, "optimizer.lr is 0.005 (there 0.001)"),
        ({"min_lr": 1e-5}, "optimizer.min_lr is "),
        ({"schedule": {"lr_warmup_iters": 1}}, "scheduler.lr_warmup_iters is "),
        ({"schedule": {"lr_decay_iters": 9}}, "scheduler.lr_decay_iters "),
        ({"schedule": {"lr_decay_style": "cosine"}}, "scheduler.lr_decay_style is cosine"),
        ({"weight_decay": 0.5}, "scheduler.start_weight_decay is 0.5"),
        ({"schedule": {"end_weight_decay": 0.5, "weight_decay_incr_style": "linear"}}, "scheduler.end_weight_decay is"),
        ({"schedule": {"run_length": 77}}, "the run's number of training steps"),
    ],
    ids=str,
)
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
    resident = WAYS["resident"]
    saved_after_two_steps(make_worker, resident(), tmp_path)
    strict = {"override_opt_param_scheduler": False}
    for policy, words in (
        (changed(resident(), strict, lr=5e-3), r"optimizer\.lr is 0\.005 \(there 0\.001\); set that to true"),
        (changed(resident(), decoupled_lr=1e-2), "cannot be resumed: its optimizer has other groups .*decoupled_lr"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            make_worker(policy).load_checkpoint(str(tmp_path))
        assert "\n" not in str(caught.value)
    worker = make_worker(changed(resident(), strict), seed=99)
    worker.load_checkpoint(str(tmp_path))
    assert worker.state.scheduler.num_steps == 2
    saved_after_two_steps(make_worker, changed(resident(), decoupled_lr=1e-2), tmp_path / "decoupled")
    worker = make_worker(changed(resident(), decoupled_lr=2e-2, lr=4e-3))
    worker.load_checkpoint(str(tmp_path / "decoupled"))
    assert {group["max_lr"] for group in worker.state.optimizer.param_groups} == {2e-2, 4e-3}
