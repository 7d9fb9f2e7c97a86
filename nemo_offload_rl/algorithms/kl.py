"""Estimates a KL divergence per token from samples, and computes a KL penalty with the right gradient.

With r = q(x) / p(x) and x drawn from p, the three estimate KL(p || q); see J. Schulman, "Approximating KL Divergence"
(http://joschu.net/blog/kl-approx.html): k1 = -log r is unbiased with high variance, k2 = (log r)^2 / 2 is biased with
low variance, k3 = (r - 1) - log r is unbiased with low variance and never negative.

This holds for their values. The gradient of a mean over samples of p is not the mean of the estimators' gradients,
since the samples depend on p, too (https://arxiv.org/abs/2506.09477): the mean of k1's gradients is 0. ``kl_penalty``
therefore weights each estimate by the probability of its token, so that the gradient includes the score-function term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from nemo_offload_rl.algorithms.importance_sampling import importance_weight

KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "k1": lambda log_ratio: -log_ratio,
        "k2": lambda log_ratio: log_ratio.square() / 2,
        "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
    }
)


def estimate_kl(logprobs: torch.Tensor, other_logprobs: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Estimates KL(p || q) at every token, for metrics only: its gradient is not the divergence's.

    Args:
        logprobs: log p of tokens drawn from p, float32 of any shape.
        other_logprobs: log q of the same tokens, same shape.
        kl_type: a key of ``KL_ESTIMATORS``.

    Returns:
        float32 of the same shape.

    Raises:
        ValueError: the estimator is unknown.
    """
    return _estimator(kl_type)(other_logprobs - logprobs)


def kl_penalty(
    logprobs: torch.Tensor,
    other_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    kl_type: str,
    input_clamp: float | None,
    output_clamp: float | None,
) -> torch.Tensor:
    """Estimates KL(p || q) at every token, with the score-function term in its gradient.

    Each estimate is weighted by p over the probability with which the token is taken to be drawn. In expectation over
    that distribution, and without clamps, value and gradient are those of E_p[k] at the sampled contexts.

    Args:
        logprobs: log p of the tokens, float32 of any shape, with gradient.
        other_logprobs: log q of the same tokens, same shape, constant.
        sampler_logprobs: log-probs of the distribution from which tokens are taken to be drawn, same shape, constant:
            the sampler's, or p's own, detached, which makes every weight 1 in value.
        kl_type: a key of ``KL_ESTIMATORS``.
        input_clamp: bound on the absolute value of log q - log p; None for none.
        output_clamp: bound on the absolute value of the weighted estimate; None for none.

    Returns:
        float32 of the same shape. An entry that either clamp has changed has no gradient, not even from its weight.

    Raises:
        ValueError: the estimator is unknown.
    """
    log_ratio = other_logprobs - logprobs
    weight = importance_weight(logprobs - sampler_logprobs)
    if input_clamp is not None:
        clamped = log_ratio.clamp(-input_clamp, input_clamp)
        weight = torch.where(clamped == log_ratio, weight, weight.detach())
        log_ratio = clamped
    kl = weight * _estimator(kl_type)(log_ratio)
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def _estimator(kl_type: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if kl_type not in KL_ESTIMATORS:
        raise ValueError(f"The KL estimator must be one of {', '.join(KL_ESTIMATORS)}, found {kl_type!r}.")
    return KL_ESTIMATORS[kl_type]
