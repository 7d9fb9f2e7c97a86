"""Measures the difference between sampler and policy probabilities, and bounds the weights that correct for it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch

from nemo_offload_rl.data.batch import BatchedData

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


def importance_weight(log_weights: torch.Tensor) -> torch.Tensor:
    """Returns exp(log_weights), but 0 where that exceeds float32, as in NeMo-RL; such an entry has no gradient."""
    weights = log_weights.exp()
    # Masked before exp, whose derivative is infinite there.
    return torch.where(weights.isfinite(), log_weights, -inf).exp()


def sequence_prob_errors(batch: BatchedData) -> torch.Tensor:
    """Returns the factor by which sampler and policy probabilities of each sample differ, as in NeMo-RL.

    Args:
        batch: has the log-probs of both.

    Returns:
        float32 [B], the mean of exp |difference of the log-probs| over a sample's trained tokens; 0 without any.
    """
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    errors = torch.where(mask > 0, batch["generation_logprobs"] - batch["prev_logprobs"], 0.0).abs()
    return (errors.exp() * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


@dataclass(frozen=True)
class Truncation:
    """Bounds importance-sampling weights, in one of NeMo-RL's three types.

    - ``tis`` clamps a token's weight to the bounds (https://fengyao.notion.site/off-policy-rl);
    - ``icepop`` masks tokens whose weight is outside the bounds (https://arxiv.org/abs/2510.18855);
    - ``seq-mask-tis`` masks samples whose geometric mean of weights is outside, and keeps the weights of the others.

    Attributes:
        type: one of the three.
        high: the upper bound; above 0.
        low: the lower bound, at most ``high``.
    """

    type: TruncationType
    high: float
    low: float

    def __call__(
        self, log_weights: torch.Tensor, weights: torch.Tensor, token_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bounds weights.

        Args:
            log_weights: log of policy over sampler probability of each token, float32 [B, T], 0 where the mask is 0.
            weights: [B, T], of ``importance_weight``, or one weight per sample repeated at each of its tokens.
            token_mask: 1 where a token counts.

        Returns:
            Weights [B, T], and a bool tensor that is true outside of the bounds: [B, T], or [B] with ``seq-mask-tis``.
        """
        if self.type == "seq-mask-tis":
            mean = (log_weights * token_mask).sum(dim=1) / token_mask.sum(dim=1).clamp(min=1)
            outside = self._is_outside(mean.exp())
            return weights * ~outside[:, None], outside
        outside = self._is_outside(weights)
        if self.type == "tis":
            return weights.clamp(self.low, self.high), outside
        return torch.where(outside, 0.0, weights), outside

    def _is_outside(self, values: torch.Tensor) -> torch.Tensor:
        return (values < self.low) | (values > self.high)
