"""Computes advantages from rewards: pure functions of rewards [P, N], a row per prompt and a column per generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

EPSILON = 1e-6


@dataclass(frozen=True)
class RewardScaling:
    """Maps rewards linearly from one range to another; clamps those outside the source range first."""

    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0

    def __post_init__(self) -> None:
        if self.source_max <= self.source_min:
            raise ValueError(
                f"grpo.reward_scaling.source_max must be above source_min, found {self.source_max} and "
                f"{self.source_min}."
            )

    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        """Maps rewards of any shape."""
        fraction = (rewards.clamp(self.source_min, self.source_max) - self.source_min) / (
            self.source_max - self.source_min
        )
        return self.target_min + fraction * (self.target_max - self.target_min)


def unscaled(rewards: torch.Tensor) -> torch.Tensor:
    """Returns rewards unchanged; replaces a ``RewardScaling`` where scaling is off."""
    return rewards


@dataclass(frozen=True)
class GroupAdvantages:
    """Computes advantages relative to the other answers to a prompt (GRPO, https://arxiv.org/abs/2402.03300).

    Attributes:
        leave_one_out: baseline (mean) and standard deviation are those of the other generations' rewards (RLOO,
            https://arxiv.org/abs/2402.14740); otherwise of the whole group's.
        normalize: divide by the standard deviation (unbiased), where it is not 0.
        clip_low: lower bound on an advantage; None for none.
        clip_high: upper bound on an advantage; None for none.
    """

    leave_one_out: bool
    normalize: bool
    clip_low: float | None
    clip_high: float | None

    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        """Returns advantages, float32 [num_prompts, num_generations], of rewards of the same shape.

        A group of one generation has no other to compare with, so its advantage is 0.
        """
        num_generations = rewards.shape[1]
        if num_generations == 1:
            return torch.zeros_like(rewards, dtype=torch.float32)
        exact = rewards.double()
        peers = exact[:, None, :].expand(-1, num_generations, -1)
        if self.leave_one_out:
            others = ~torch.eye(num_generations, dtype=torch.bool, device=rewards.device)
            peers = peers[:, others].view(len(rewards), num_generations, num_generations - 1)
        advantages = exact - peers.mean(dim=-1)
        if self.normalize:
            deviation = _unbiased_std(peers)
            advantages = torch.where(deviation > 0, advantages / (deviation + EPSILON), advantages)
        if self.clip_low is not None or self.clip_high is not None:
            advantages = advantages.clamp(self.clip_low, self.clip_high)
        return advantages.float()


def informative_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Returns which prompts give a gradient: bool [num_prompts], true where a row's rewards are not all the same.

    Those are the rows with an advantage other than 0, for the whole group's baseline and for a leave-one-out one.
    """
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def _unbiased_std(values: torch.Tensor) -> torch.Tensor:
    """Returns the standard deviation over the last dimension; 0 for a single value, for which it is undefined."""
    if values.shape[-1] == 1:
        return torch.zeros_like(values[..., 0])
    return values.std(dim=-1, unbiased=True)
