"""Tests the detection of steps that change no parameter."""

import pytest
import torch
from support.tiny import random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.build import UnchangedParametersError


def train(worker, count):
    for seed in range(count):
        worker.train(random_batch(4, seed=seed), NLLLoss(), gbs=4, mbs=4)


def test_an_optimizer_that_reaches_no_parameter_is_an_error(make_worker, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: None)
    worker = make_worker()
    train(worker, 2)
    with pytest.raises(UnchangedParametersError, match=r"changed none .*norm is \S+ and the learning rate 0\.001"):
        train(worker, 1)


def test_gradients_of_next_to_nothing_may_change_nothing(make_worker):
    worker = make_worker()
    for _ in range(5):
        worker.state.watch.before_step()
        worker.state.watch.after_step(1e-7, [1e-3], torch.device("cpu"))


def test_matrices_of_all_sizes_are_compared_and_norms_are_not(make_worker):
    watched = make_worker().state.watch._parameters
    assert 3 < len(watched) <= 16
    assert all(parameter.ndim == 2 for parameter in watched)
    assert len({parameter.numel() for parameter in watched}) > 2


def test_steps_that_are_not_to_change_anything_are_none(make_worker, monkeypatch):
    policy = tiny_policy()
    policy["megatron_cfg"]["scheduler"] |= {"lr_warmup_init": 0.0, "lr_warmup_iters": 5}
    train(make_worker(policy), 2)
    worker = make_worker()
    worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=4)
    monkeypatch.setattr("nemo_offload_rl.mcore.step._clip_and_update", lambda *_: None)
    for group in worker.state.optimizer.param_groups:
        group["lr"] = 0.0
    monkeypatch.setattr(worker.state.scheduler, "step", lambda increment: None)
    train(worker, 4)
