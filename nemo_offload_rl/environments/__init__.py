"""Computes rewards by comparing responses with known answers."""

from nemo_offload_rl.environments.errors import RewardError
from nemo_offload_rl.environments.math_reward import make_math_reward
from nemo_offload_rl.environments.python_reward import make_python_reward
from nemo_offload_rl.environments.rewards import Case, Judge, Judgements, Reward, make_reward

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
