import math

import pytest
import torch

from nemo_offload_rl.algorithms.losses import estimate_kl, kl_penalty


@pytest.mark.parametrize(
    ("kl_type", "expected"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))]
)
def test_estimators_by_hand(kl_type, expected):
    p, q = torch.tensor(0.5).log(), torch.tensor(0.25).log()  # r = q / p = 1/2
    assert estimate_kl(p, q, kl_type).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_unbiased_estimators_have_the_divergence_as_their_mean(kl_type):
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    mean = (p * estimate_kl(p.log(), q.log(), kl_type)).sum()
    assert mean.item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)


def test_k3_is_exact_and_positive_for_tiny_ratios():
    logp = torch.tensor([-1.0, -1.0])
    kl = estimate_kl(logp, logp + torch.tensor([1e-3, -1e-3]), "k3")
    assert (kl > 0).all()
    assert kl.tolist() == pytest.approx([5.0e-7] * 2, rel=1e-2, abs=1e-7)


def penalty(other, sampler, kl_type="k3", input_clamp=None, output_clamp=None):
    """Returns values and gradients of the penalty of tokens whose log-prob is 0."""
    logp = torch.zeros(len(other), requires_grad=True)
    kl = kl_penalty(logp, torch.tensor(other), torch.tensor(sampler), kl_type, input_clamp, output_clamp)
    kl.sum().backward()
    return kl.tolist(), logp.grad.tolist()


def test_clamps_bound_value_and_gradient():
    values, gradients = penalty([1.0, 50.0, -50.0], [0.0, 0.0, 0.0], input_clamp=20.0, output_clamp=10.0)
    assert values == pytest.approx([math.e - 2, 10.0, 10.0])
    # gradient of the first: 1 - e by the estimate and e - 2 by the probability of its token
    assert gradients == pytest.approx([-1, 0, 0])


def test_a_clamped_input_keeps_the_weight_and_loses_all_gradient():
    values, gradients = penalty([-50.0, -2.0], [-1.0, -1.0], "k1", input_clamp=20.0)
    assert values == pytest.approx([20 * math.e, 2 * math.e])
    assert gradients == pytest.approx([0, (1 + 2) * math.e])


def test_the_output_clamp_bounds_what_is_weighed():
    values, gradients = penalty([-3.0, -2.0, 2.0], [-1.0, -1.0, -3.0], "k1", output_clamp=6.0)
    assert values == pytest.approx([6.0, 2 * math.e, -6.0])
    assert gradients == pytest.approx([0, 3 * math.e, 0])


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="one of k1, k2, k3, found 'k4'"):
        estimate_kl(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="one of k1, k2, k3, found 'k4'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), torch.zeros(1), "k4", None, None)
