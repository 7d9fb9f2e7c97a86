"""Computes rewards by comparing responses with known answers."""

from nemo_offload_rl.environments.pooled_reward import make_math_reward, make_python_reward
from nemo_offload_rl.environments.rewards import Case, Judge, Judgements, Reward, RewardError, make_reward

__all__ = [
    "Case",
    "Judge",
    "Judgements",
    "Reward",
    "RewardError",
    "make_math_reward",
    "make_python_reward",
    "make_reward",
]
