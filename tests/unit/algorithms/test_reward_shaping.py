import torch

from nemo_offload_rl.algorithms.advantages import RewardScaling, unscaled
from nemo_offload_rl.algorithms.grpo import _make_reward_scaling, _make_reward_shaping
from nemo_offload_rl.algorithms.reward_shaping import OverlongPenalty, StopProperlyPenalty
from nemo_offload_rl.algorithms.rollouts import Rollouts
from nemo_offload_rl.config import load
from nemo_offload_rl.data.batch import BatchedData, response_batch
from tests.unit.config.conftest import CONFIGS


def rollouts(lengths: list[int], truncated: list[bool], rewards: list[list[float]]) -> Rollouts:
    """Returns rollouts whose answers have these numbers of tokens, after prompts of three."""
    batch: BatchedData = response_batch([[1, 2, 3]] * len(lengths), [[4] * length for length in lengths], 0)
    return Rollouts(batch, torch.tensor(rewards), torch.tensor(truncated))


def test_the_overlong_penalty_worked_out_by_hand():
    # With a buffer of four tokens before ten, 6 tokens cost nothing, 7 a quarter of 2.0, 10 all of it, 14 twice that.
    answers = rollouts([1, 6, 7, 10, 12, 14], [False] * 6, [[1.0, 1.0, 1.0], [1.0, 0.0, -1.0]])
    shaped = OverlongPenalty(buffer_length=4, penalty=2.0, max_response_length=10)(answers.rewards, answers)
    assert shaped.tolist() == [[1.0, 1.0, 0.5], [-1.0, -3.0, -5.0]]
    assert answers.rewards.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, -1.0]]


def test_answers_that_were_cut_off_keep_a_share_of_their_reward():
    answers = rollouts([3, 3, 3, 3], [False, True, True, False], [[1.0, 1.0], [-2.0, 0.5]])
    assert StopProperlyPenalty(0.25)(answers.rewards, answers).tolist() == [[1.0, 0.25], [-0.5, 0.5]]
    assert StopProperlyPenalty(0.0)(answers.rewards, answers).tolist() == [[1.0, 0.0], [0.0, 0.5]]


def test_a_recipe_says_which_penalty_and_which_scaling_there_is():
    on, stop = "grpo.reward_shaping.enabled=true", "grpo.reward_shaping.stop_properly_penalty_coef=0.0"
    overlong, properly = OverlongPenalty(128, 1.0, 16), StopProperlyPenalty(0.0)
    for overrides, expected in (([], None), ([on], overlong), ([on, stop], properly), (["~grpo.reward_shaping"], None)):
        assert _make_reward_shaping(load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).config["grpo"]) == expected
    ranges = {"source_min": -1.0, "source_max": 1.0, "target_min": 0.0, "target_max": 3.0}
    assert _make_reward_scaling({"reward_scaling": {"enabled": True, **ranges}}) == RewardScaling(**ranges)
    for off in ({}, {"reward_scaling": {"enabled": False, **ranges}}):
        assert _make_reward_scaling(off) is unscaled
