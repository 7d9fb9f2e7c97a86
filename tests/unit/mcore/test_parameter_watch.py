"""Steps that change no parameter."""

import pytest
import torch
from support.tiny import random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.parameter_watch import UnchangedParametersError


def train(worker, count):
    for seed in range(count):
        worker.train(random_batch(4, seed=seed), NLLLoss(), gbs=4, mbs=4)


def test_an_optimizer_that_reaches_no_parameter_is_an_error(make_worker, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: None)
    worker = make_worker()
    train(worker, 2)
    with pytest.raises(UnchangedParametersError, match=r"changed none .*norm is \S+ and the learning rate 0\.001"):
        train(worker, 1)


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
