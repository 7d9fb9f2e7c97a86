"""Tests the KL penalty's gradient by enumerating every sequence of a small policy.

Expectations over samples are sums over all outcomes, weighted by their probability, in float64. The expected values are
written from the definitions: sums of p log(p / q) that autograd differentiates, and NeMo-RL's formula token by token.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support.losses import PLAIN

from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.data.batch import BatchedData, GlobalCounts

PENALTY = replace(PLAIN, reference_policy_kl_penalty=1.0, kl_input_clamp_value=None, kl_output_clamp_value=None)
# Settings of the policy-gradient term, none of which may affect the penalty.
OTHER_SETTINGS = {
    "token level": {},
    "sample level": {"token_level_loss": False},
    "forced ratio": {"force_on_policy_ratio": True},
    "sampler correction": {"use_importance_sampling_correction": True},
    "GSPO": {"token_level_loss": False, "sequence_level_importance_ratios": True},
    "REINFORCE": {"disable_ppo_ratio": True},
}
ON_POLICY, OFF_POLICY = "on policy", "off policy"
UNBIASED_CASES = [(ON_POLICY, False), (ON_POLICY, True), (OFF_POLICY, True)]  # of the sampler, and of the weight
NUM_TOKENS = 3


class Chain:
    """Defines a policy over sequences of two tokens, the second of which depends on the first.

    Row 0 of ``logits`` is for the first token, row 1 + a for the second after a; all share the last row.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(NUM_TOKENS + 2, NUM_TOKENS, dtype=torch.float64, generator=generator)

    def conditionals(self) -> torch.Tensor:
        """Returns log-probs [1 + NUM_TOKENS, NUM_TOKENS] of a token in each context."""
        return (self.logits[:-1] + self.logits[-1]).log_softmax(dim=-1)

    def sequences(self) -> torch.Tensor:
        """Returns log-probs [9, 2] of both tokens of every sequence."""
        table = self.conditionals()
        return torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a, b in sequences()])


def sequences() -> list[tuple[int, int]]:
    return [(a, b) for a in range(NUM_TOKENS) for b in range(NUM_TOKENS)]


def estimator(kl_type: str, log_ratio: torch.Tensor) -> torch.Tensor:
    """Returns k as a function of log q - log p."""
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}[kl_type]


def mean_estimate(kl_type: str, logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    """Returns E_p[k] over the last dimension; for k1 and k3 the divergence itself."""
    return (logp.exp() * estimator(kl_type, logq - logp)).sum(dim=-1)


def divergence(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    """Returns KL(p || q) over the last dimension."""
    return (logp.exp() * (logp - logq)).sum(dim=-1)


def one_sample(
    logp: torch.Tensor, reference: torch.Tensor, sampler: torch.Tensor
) -> tuple[torch.Tensor, BatchedData, GlobalCounts]:
    """Returns the loss's inputs for one sample of those tokens, after a prompt of one token."""

    def column(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.float64), values.double()])[None]

    data = BatchedData(
        token_mask=column(torch.ones_like(logp)),
        sample_mask=torch.ones(1, dtype=torch.float64),
        prev_logprobs=column(sampler + 0.1),
        generation_logprobs=column(sampler),
        reference_policy_logprobs=column(reference),
        advantages=column(torch.zeros_like(logp)),
    )
    return column(logp), data, GlobalCounts.of(data)


def expected_loss(
    loss: ClippedPGLoss, current: torch.Tensor, reference: torch.Tensor, sampler: torch.Tensor
) -> torch.Tensor:
    """Returns the expected loss over the sampler's samples; the rows are log-probs of every possible sample."""
    drawn_with = sampler.detach()
    rows = zip(current, reference.detach(), drawn_with, strict=True)
    losses = torch.stack([loss(*one_sample(*row))[0] for row in rows])
    return (drawn_with.sum(dim=1).exp() * losses).sum()


def expected_gradient(loss: ClippedPGLoss, policy: Chain, reference: Chain, sampler: Chain) -> torch.Tensor:
    """Returns the gradient with respect to the policy's logits, in expectation over the sampler's sequences."""
    policy.logits.requires_grad_()
    total = expected_loss(loss, policy.sequences(), reference.sequences(), sampler.sequences())
    return torch.autograd.grad(total, policy.logits)[0]


def gradient_at_reached_contexts(measure, policy: Chain, reference: Chain, sampler: Chain) -> torch.Tensor:
    """Returns the gradient of ``measure``'s mean over both tokens, in contexts drawn by the sampler."""
    policy.logits.requires_grad_()
    reached = torch.cat([torch.ones(1, dtype=torch.float64), sampler.conditionals()[0].exp()]).detach()
    per_context = measure(policy.conditionals(), reference.conditionals())
    return torch.autograd.grad((reached * per_context).sum() / 2, policy.logits)[0]


def chains(sampled: str) -> tuple[Chain, Chain, Chain]:
    policy, reference = Chain(seed=1), Chain(seed=2)
    return policy, reference, Chain(seed=1) if sampled == ON_POLICY else Chain(seed=3)


@pytest.mark.parametrize("settings", OTHER_SETTINGS)
@pytest.mark.parametrize(("sampled", "weighed"), UNBIASED_CASES)
@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_the_expected_gradient_is_that_of_the_expected_estimate(kl_type, sampled, weighed, settings):
    """With k1 and k3 that is the divergence's gradient, with k2 it is not."""
    own = {"reference_policy_kl_type": kl_type, "use_on_policy_kl_approximation": weighed}
    found = expected_gradient(replace(PENALTY, **own, **OTHER_SETTINGS[settings]), *chains(sampled))
    wanted = gradient_at_reached_contexts(partial(mean_estimate, kl_type), *chains(sampled))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert wanted.abs().max() > 0.05
    of_divergence = gradient_at_reached_contexts(divergence, *chains(sampled))
    assert torch.allclose(found, of_divergence, rtol=1e-10, atol=1e-12) == (kl_type != "k2")
    if kl_type == "k2":
        assert (found - of_divergence).norm() > 0.2 * of_divergence.norm()


def test_k2_agrees_with_the_divergence_near_the_reference():
    def relative_error(distance: float) -> float:
        policy, reference = Chain(seed=1), Chain(seed=1)
        policy.logits = reference.logits + distance * Chain(seed=2).logits
        loss = replace(PENALTY, reference_policy_kl_type="k2")
        found = expected_gradient(loss, policy, reference, policy)
        wanted = gradient_at_reached_contexts(divergence, policy, reference, policy)
        return float((found - wanted).norm() / wanted.norm())

    assert relative_error(1e-3) < 1e-2 < relative_error(1.0)


def test_a_first_tokens_gradient_does_not_see_where_it_leads():
    """The divergence of whole sequences also changes with how often each first token is drawn; the penalty does not."""
    policy, reference, _ = chains(ON_POLICY)
    found = expected_gradient(PENALTY, policy, reference, policy)
    table, reference_table = policy.conditionals(), reference.conditionals()
    per_context = divergence(table, reference_table)
    whole = (per_context[0] + (table[0].exp() * per_context[1:]).sum()) / 2
    (wanted,) = torch.autograd.grad(whole, policy.logits)
    torch.testing.assert_close(found[1:-1], wanted[1:-1], rtol=1e-10, atol=1e-12)
    assert (found[0] - wanted[0]).norm() > 0.05


def test_k3_has_the_less_noisy_gradient():
    """One sample's gradient is log(p / q) times that of log p with k3, and 1 more with k1, whose mean is 0."""
    logp = torch.tensor([-0.5, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.7, -1.0, -2.0], dtype=torch.float64)
    for kl_type, more in (("k1", 1), ("k3", 0)):
        loss = replace(PENALTY, reference_policy_kl_type=kl_type)
        value, _ = loss(*one_sample(logp, reference, logp.detach()))
        torch.testing.assert_close(3 * torch.autograd.grad(value, logp)[0], logp.detach() - reference + more)


def nemo_rl_penalty(kl_type, current, reference, drawn_with, input_clamp, output_clamp) -> tuple[float, float]:
    """Computes NeMo-RL's penalty of one token and its derivative by the token's log-prob, from #2506 and #2958 on."""
    log_ratio = reference - current
    inside = input_clamp is None or abs(log_ratio) <= input_clamp
    if not inside:
        log_ratio = np.sign(log_ratio) * input_clamp
    weight = np.exp(current - drawn_with)
    value, slope = {
        "k1": (-log_ratio, 1.0),
        "k2": (log_ratio**2 / 2, -log_ratio),
        "k3": (np.expm1(log_ratio) - log_ratio, -np.expm1(log_ratio)),
    }[kl_type]
    value, slope = weight * value, weight * (value + slope) * inside
    if output_clamp is not None and abs(value) > output_clamp:
        return float(np.sign(value) * output_clamp), 0.0
    return float(value), float(slope)


@pytest.mark.parametrize("clamps", [(None, None), (0.5, None), (None, 0.3), (1.0, 0.5)])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_off_policy_and_clamped_it_is_nemo_rls_formula(kl_type, weighed, clamps):
    rng = np.random.default_rng(0)
    current = -rng.uniform(0.1, 4.0, 200)
    reference, sampler = (np.minimum(current + rng.normal(scale=0.7, size=200), -1e-3) for _ in range(2))
    own = {"reference_policy_kl_type": kl_type, "use_on_policy_kl_approximation": weighed}
    loss = replace(PENALTY, **own, kl_input_clamp_value=clamps[0], kl_output_clamp_value=clamps[1])
    logp = torch.from_numpy(current).requires_grad_()
    value, _ = loss(*one_sample(logp, torch.from_numpy(reference), torch.from_numpy(sampler)))
    value.backward()
    drawn_with = sampler if weighed else current
    rows = zip(current, reference, drawn_with, strict=True)
    wanted = [nemo_rl_penalty(kl_type, *row, *clamps) for row in rows]
    assert value.item() == pytest.approx(np.mean([one[0] for one in wanted]), rel=1e-9)
    np.testing.assert_allclose(logp.grad.numpy() * 200, [one[1] for one in wanted], rtol=1e-9, atol=1e-12)
    changed = sum(one[1] == 0 for one in wanted)
    assert (changed > 0) == (clamps != (None, None))
    assert changed < 200
