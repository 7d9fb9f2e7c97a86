"""Tests the loss of DPO against hand-computed numbers, loops in float64, and finite differences."""

import math

import pytest
import torch

from nemo_offload_rl.algorithms.losses import DPOLoss
from nemo_offload_rl.data.batch import BatchedData, GlobalCounts

PLAIN = {"reference_policy_kl_penalty": 0.5, "preference_loss_weight": 1.0, "sft_loss_weight": 0.0}
PLAIN |= {"preference_average_log_probs": False, "sft_average_log_probs": False}
VARIANTS = {
    "plain": {},
    "averaged preference": {"preference_average_log_probs": True},
    "with SFT": {"sft_loss_weight": 0.3},
    "with averaged SFT": {"sft_loss_weight": 0.3, "sft_average_log_probs": True, "preference_loss_weight": 0.7},
    "SFT alone": {"sft_loss_weight": 2.0, "preference_loss_weight": 0.0},
}


def dpo(**changed) -> DPOLoss:
    return DPOLoss(**(PLAIN | changed))


def random_pairs(num_pairs=5, width=8, seed=0) -> tuple[torch.Tensor, BatchedData]:
    """Returns log-probs and pairs whose rows and prompts have unequal lengths; the second pair is masked out."""
    rng = torch.Generator().manual_seed(seed)
    rows = 2 * num_pairs
    lengths = torch.randint(5, width + 1, (rows,), generator=rng)
    prompts = torch.randint(1, 4, (num_pairs,), generator=rng).repeat_interleave(2)
    positions = torch.arange(width)
    is_token = positions < lengths[:, None]
    logprobs = -torch.rand(rows, width, generator=rng) * 2 - 0.1
    sample_mask = torch.ones(rows)
    sample_mask[2:4] = 0
    data = BatchedData(
        input_ids=torch.randint(0, 9, (rows, width), generator=rng),
        input_lengths=lengths,
        token_mask=(is_token & (positions >= prompts[:, None])).float(),
        sample_mask=sample_mask,
        reference_policy_logprobs=(logprobs + torch.randn(rows, width, generator=rng)).clamp(max=-0.01) * is_token,
    )
    return logprobs * is_token, data.in_groups(2)


def loss_by_loops(loss: DPOLoss, logprobs: torch.Tensor, data: BatchedData) -> float:
    """Computes the loss one token at a time, in Python's float64."""
    total, pairs = 0.0, [row for row in range(0, data.size, 2) if data["sample_mask"][row] > 0]
    for chosen in pairs:
        rewards, likelihood = [], 0.0
        for row in (chosen, chosen + 1):
            tokens = [t for t in range(1, data["token_mask"].shape[1]) if data["token_mask"][row, t] > 0]
            answer = sum(float(logprobs[row, t]) for t in tokens)
            reward = answer - sum(float(data["reference_policy_logprobs"][row, t]) for t in tokens)
            rewards.append(reward / len(tokens) if loss.preference_average_log_probs else reward)
            if row == chosen:
                likelihood = answer / len(tokens) if loss.sft_average_log_probs else answer
        margin = loss.reference_policy_kl_penalty * (rewards[0] - rewards[1])
        total += loss.preference_loss_weight * math.log1p(math.exp(-margin)) - loss.sft_loss_weight * likelihood
    return total / len(pairs)


def test_two_pairs_worked_out_by_hand():
    # Each row has two answer tokens after one prompt token.
    logprobs = torch.tensor([[0, -1.0, -2.0], [0, -3.0, -1.0], [0, -0.5, -0.5], [0, -1.0, -0.5]])
    data = BatchedData(
        token_mask=torch.tensor([[0.0, 1, 1]] * 4),
        sample_mask=torch.ones(4),
        reference_policy_logprobs=torch.tensor([[0, -2.0, -2.0], [0, -2.0, -1.0], [0, -0.5, -0.25], [0, -1.0, -1.0]]),
    )
    # Rewards: 1 and -1, -0.25 and 0.5; margins 2 and -0.75.
    loss, metrics = dpo(sft_loss_weight=0.1)(logprobs, data, GlobalCounts.of(data))
    preference = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(0.375))) / 2
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {"preference_loss": preference, "sft_loss": 2.0, "accuracy": 0.5, "num_valid_samples": 2}  # SFT of -3 and -1
        | {"rewards_chosen_mean": 0.375, "rewards_rejected_mean": -0.25, "rewards_margin_mean": 0.625}
        | {"logprobs_chosen_mean": -2.0, "logprobs_rejected_mean": -2.75},
        rel=1e-6,
    )
    assert float(loss) == pytest.approx(preference + 0.2)
    assert dpo()(logprobs, data, GlobalCounts.of(data))[1]["sft_loss"] == 0  # as in NeMo-RL, where it has no weight


@pytest.mark.parametrize("name", VARIANTS)
def test_value_and_gradient_are_those_of_loops_in_float64(name):
    loss_fn = dpo(**VARIANTS[name])
    logprobs, data = random_pairs()
    logprobs.requires_grad_()
    loss, _ = loss_fn(logprobs, data, GlobalCounts.of(data))
    assert loss.item() == pytest.approx(loss_by_loops(loss_fn, logprobs.detach(), data), rel=1e-6)
    loss.backward()
    exact = logprobs.detach().double()
    for row, token in [(0, 3), (1, 4), (2, 3), (5, 3), (8, 3), (9, 4), (0, 0)]:
        step = torch.zeros_like(exact)
        step[row, token] = 1e-6
        upper, lower = (loss_by_loops(loss_fn, exact + sign * step, data) for sign in (1, -1))
        assert float(logprobs.grad[row, token]) == pytest.approx((upper - lower) / 2e-6, abs=2e-6), (row, token)
