"""Shapes rewards by the length of answers, with NeMo-RL's two penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nemo_offload_rl.algorithms.rollouts import Rollouts

# Maps scaled rewards [P, N] and their rollouts to the shaped rewards [P, N] from which advantages are computed.
RewardShaping = Callable[[torch.Tensor, Rollouts], torch.Tensor]


@dataclass(frozen=True)
class OverlongPenalty:
    """Lowers rewards by a penalty that grows with an answer's tokens (DAPO, https://arxiv.org/abs/2503.14476).

    The penalty is 0 up to ``max_response_length - buffer_length`` tokens, grows linearly to ``penalty`` at
    ``max_response_length``, and keeps growing above that, as in NeMo-RL.

    Attributes:
        buffer_length: tokens over which the penalty grows to ``penalty``; above 0.
        penalty: the penalty of an answer of ``max_response_length`` tokens; 0 or more.
        max_response_length: tokens of an answer, including its stop token.
    """

    buffer_length: int
    penalty: float
    max_response_length: int

    def __call__(self, rewards: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
        """Subtracts the penalty."""
        excess = rollouts.response_tokens - (self.max_response_length - self.buffer_length)
        penalty = excess.clamp(min=0) / self.buffer_length * self.penalty
        return rewards - penalty.view_as(rewards)


@dataclass(frozen=True)
class StopProperlyPenalty:
    """Scales down the rewards of answers that were cut off at their length limit.

    Attributes:
        factor: multiplies their rewards; from 0, which removes the rewards, to 1, which changes nothing.
    """

    factor: float

    def __call__(self, rewards: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
        """Scales the rewards."""
        return torch.where(rollouts.truncated.view_as(rewards), rewards * self.factor, rewards)
