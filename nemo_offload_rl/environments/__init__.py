"""Rewards with a checkable answer."""

from nemo_offload_rl.environments.rewards import Reward, RewardError, make_reward

__all__ = ["Reward", "RewardError", "make_reward"]
