from fractions import Fraction

import numpy as np
import pytest
import torch

from nemo_offload_rl.algorithms.advantages import GroupAdvantages, RewardScaling, informative_groups


def advantages(leave_one_out=False, normalize=False, clip_low=None, clip_high=None):
    return GroupAdvantages(leave_one_out, normalize, clip_low, clip_high)


REWARDS = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 2, 4, 6]])


def test_without_anything_it_is_the_distance_to_the_mean():
    assert advantages()(REWARDS).tolist() == [[0.75, -0.25, -0.25, -0.25], [0, 0, 0, 0], [-3, -1, 1, 3]]


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_against_plain_loops(leave_one_out, normalize):
    rewards = np.random.default_rng(0).normal(size=(5, 6))
    expected = np.empty_like(rewards)
    for group, row in enumerate(rewards):
        for index, reward in enumerate(row):
            peers = np.delete(row, index) if leave_one_out else row
            expected[group, index] = reward - peers.mean()
            if normalize:
                expected[group, index] /= peers.std(ddof=1) + 1e-6
    result = advantages(leave_one_out, normalize)(torch.from_numpy(rewards).float())
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_that_floats_cannot_hold_teach_nothing(leave_one_out):
    rewards = torch.full((1, 7), 0.1)
    assert advantages(leave_one_out, normalize=True)(rewards).abs().max() < 1e-6


def test_bounds_cut_advantages_and_small_groups_have_some():
    result = advantages(normalize=True, clip_low=-0.4, clip_high=1.0)(REWARDS)
    assert result[0].tolist() == pytest.approx([1.0, -0.4, -0.4, -0.4])
    assert advantages(clip_high=1.0)(REWARDS)[2].tolist() == [-3, -1, 1, 1]
    assert advantages(leave_one_out=True, normalize=True)(torch.tensor([[3.0]])).tolist() == [[0]]
    assert advantages(leave_one_out=True, normalize=True)(torch.tensor([[3.0, 1.0]])).tolist() == [[2, -2]]


@pytest.mark.parametrize("num_generations", [2, 3, 4, 8])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_informative_groups_are_those_with_an_advantage(leave_one_out, num_generations):
    """Compares whole groups exactly, also where all other answers score alike, as those of the 1 in [1, 0, 0]."""
    rng = np.random.default_rng(num_generations)
    rewards = torch.from_numpy(rng.choice([0.0, 0.35, 1.0], size=(200, num_generations), p=[0.1, 0.1, 0.8])).float()
    teaches = []
    for row in rewards.tolist():
        exact = [Fraction(reward) for reward in row]
        peers = [exact[:i] + exact[i + 1 :] if leave_one_out else exact for i in range(num_generations)]
        teaches.append(any(r - sum(others) / len(others) != 0 for r, others in zip(exact, peers, strict=True)))
    assert informative_groups(rewards).tolist() == teaches
    found = advantages(leave_one_out, normalize=True)(rewards)
    assert (found != 0).any(dim=1).tolist() == teaches
    assert 0 < sum(teaches) < 200


def test_peers_that_floats_cannot_hold_do_not_blow_up_the_one_that_differs():
    (found,) = advantages(leave_one_out=True, normalize=True)(torch.tensor([[0.95] + [0.35] * 7])).tolist()
    assert found[0] == pytest.approx(0.6)
    assert max(map(abs, found[1:])) < 1


def test_scaling_is_linear_and_clamps_first():
    scale = RewardScaling(source_min=0.0, source_max=1.0, target_min=-1.0, target_max=3.0)
    assert scale(torch.tensor([0.0, 0.25, 1.0, 2.0, -1.0])).tolist() == [-1, 0, 3, 3, -1]
    with pytest.raises(ValueError, match="source_max must be above source_min"):
        RewardScaling(1.0, 1.0, 0.0, 1.0)
