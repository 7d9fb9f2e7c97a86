"""Per-token estimators of a KL divergence from samples, and the KL penalty that has their gradient.

With r = q(x) / p(x) and x drawn from p, the three estimate KL(p || q); see J. Schulman, "Approximating KL Divergence"
(http://joschu.net/blog/kl-approx.html): k1 = -log r is unbiased and noisy, k2 = (log r)^2 / 2 is biased and
calm, k3 = (r - 1) - log r is unbiased, calm and never negative.

That is about their values. The gradient of a mean over samples of p is not the mean of their gradients, since the
samples change with p, too (https://arxiv.org/abs/2506.09477): that of k1 would be 0. ``kl_penalty`` therefore
weighs each estimate by the probability of its token, so that the score-function term is part of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "k1": lambda log_ratio: -log_ratio,
        "k2": lambda log_ratio: log_ratio.square() / 2,
        "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
    }
)


def estimate_kl(logprobs: torch.Tensor, other_logprobs: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Estimates KL(p || q) at every token, as a number to look at: its gradient is not the divergence's.

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

    Each estimate is weighed by p over the probability that the token counts as drawn with. In expectation over that
    distribution, and without clamps, both value and gradient are those of E_p[k] at the contexts that were reached.

    Args:
        logprobs: log p of the tokens, float32 of any shape, with gradient.
        other_logprobs: log q of the same tokens, same shape, constant.
        sampler_logprobs: log-probs that the tokens count as drawn with, same shape, constant: the sampler's, or those
            of p itself, detached, which makes every weight 1 in value.
        kl_type: a key of ``KL_ESTIMATORS``.
        input_clamp: bound on the absolute value of log q - log p; None for none.
        output_clamp: bound on the absolute value of the weighted estimate; None for none.

    Returns:
        float32 of the same shape. An entry that either clamp has changed has no gradient, its weight's included.

    Raises:
        ValueError: the estimator is unknown.
    """
    log_ratio = other_logprobs - logprobs
    weight = (logprobs - sampler_logprobs).exp()
    if input_clamp is not None:
        clamped = log_ratio.clamp(-input_clamp, input_clamp)
        weight = torch.where(clamped == log_ratio, weight, weight.detach())
        log_ratio = clamped
    kl = weight * _estimator(kl_type)(log_ratio)
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def _estimator(kl_type: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if kl_type not in KL_ESTIMATORS:
        raise ValueError(f"The KL estimator is one of {', '.join(KL_ESTIMATORS)}, found {kl_type!r}.")
    return KL_ESTIMATORS[kl_type]
