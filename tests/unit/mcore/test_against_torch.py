"""Tests that gradients and updates equal those of plain torch and transformers."""

import pytest
import torch
from support.tiny import TINY_QWEN3_MOE, in_transformers, random_batch, tiny_policy, with_plain_sgd

from nemo_offload_rl.algorithms.losses import NLLLoss


def nll(model, data) -> torch.Tensor:
    logits = model(data["input_ids"]).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return -(logprobs * mask).sum() / mask.sum()


def test_every_gradient_is_that_of_the_hugging_face_model(make_worker):
    worker = make_worker(with_plain_sgd(tiny_policy()))
    model = in_transformers(worker)
    before = {name: weight.clone() for name, weight in worker.hf_weights()}
    data = random_batch(8)
    nll(model, data).backward()
    worker.train(data, NLLLoss(), gbs=8, mbs=4)
    after = dict(worker.hf_weights())
    for name, parameter in model.named_parameters():
        step = before[name] - after[name]  # with plain SGD at rate 1 the update is the gradient
        error = float((step - parameter.grad).norm() / parameter.grad.norm())
        assert error < 1e-3, name  # weights near 1 hold their small gradients to 1e-4


@pytest.mark.parametrize("distributed", [True, False])
def test_adam_with_clipping_takes_the_steps_of_torch(make_worker, distributed):
    schedule = {"lr_warmup_iters": 0, "start_weight_decay": 0.0, "end_weight_decay": 0.0}
    optimizer = {"weight_decay": 0.0, "use_distributed_optimizer": distributed}
    worker = make_worker(tiny_policy(optimizer=optimizer, scheduler=schedule))
    model = in_transformers(worker)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for seed in range(5):
        data = random_batch(8, seed=seed)
        adam.zero_grad()
        nll(model, data).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        result = worker.train(data, NLLLoss(), gbs=8, mbs=2)
        assert norm > 1.0  # so that clipping takes effect
        assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    trained = dict(worker.hf_weights())
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - start[name]).norm()
        assert float((trained[name] - parameter.detach()).norm() / moved) < 1e-3, name


def test_experts_compute_what_those_of_the_hugging_face_model_do(make_worker):
    worker = make_worker(tiny_policy(TINY_QWEN3_MOE))
    model = in_transformers(worker)
    data = random_batch(4)
    assert worker.evaluate(data, NLLLoss(), mbs=4)["loss"] == pytest.approx(float(nll(model, data)), rel=1e-5)
