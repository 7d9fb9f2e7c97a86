"""Per-token estimators of a KL divergence from samples.

With r = q(x) / p(x) and x drawn from p, the three estimate KL(p || q); see J. Schulman, "Approximating KL Divergence"
(http://joschu.net/blog/kl-approx.html): k1 = -log r is unbiased and noisy, k2 = (log r)^2 / 2 is biased and
calm, k3 = (r - 1) - log r is unbiased, calm and never negative.
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


def estimate_kl(
    logprobs: torch.Tensor,
    other_logprobs: torch.Tensor,
    kl_type: str,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> torch.Tensor:
    """Estimates KL(p || q) at every token.

    Args:
        logprobs: log p of tokens drawn from p, float32 of any shape.
        other_logprobs: log q of the same tokens, same shape.
        kl_type: a key of ``KL_ESTIMATORS``.
        input_clamp: bound on the absolute value of log q - log p; None for none.
        output_clamp: bound on the absolute value of the estimate; None for none.

    Returns:
        float32 of the same shape. A clamped entry has no gradient.

    Raises:
        ValueError: the estimator is unknown.
    """
    if kl_type not in KL_ESTIMATORS:
        raise ValueError(f"The KL estimator is one of {', '.join(KL_ESTIMATORS)}, found {kl_type!r}.")
    log_ratio = other_logprobs - logprobs
    if input_clamp is not None:
        log_ratio = log_ratio.clamp(-input_clamp, input_clamp)
    kl = KL_ESTIMATORS[kl_type](log_ratio)
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)
