import array
import hashlib
import math

import numpy as np
import pytest
import torch

from nemo_offload_rl.generation.sampling import choose_tokens, row_seed, row_uniforms
from nemo_offload_rl.generation.saved_memory import SavedMemory

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def _sample(num_draws: int, seed: int = 0, **options):
    uniforms = torch.from_numpy(np.random.default_rng(seed).random(num_draws))
    settings = {"temperature": 1.0, "top_k": None, "top_p": 1.0} | options
    return choose_tokens(LOGITS.expand(num_draws, -1), uniforms, **settings)


def _chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=probs.numel()).double()
    expected = probs.double() * tokens.numel()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def test_uniforms_are_those_of_numpys_philox_and_belong_to_the_row_and_not_to_the_batch():
    prompts, sample_ids = [[5, 6], [5, 6], [7], [5, 6, 7]], [0, 1, 0, 0]
    together = row_uniforms(3, 9, prompts, sample_ids, 6)
    for row, prompt in enumerate(prompts):
        key = hashlib.blake2b(array.array("q", [3, 9, sample_ids[row], *prompt]).tobytes(), digest_size=16).digest()
        expected = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).random(6)
        np.testing.assert_array_equal(together[row], expected)
    np.testing.assert_array_equal(row_uniforms(3, 9, prompts, sample_ids, 2), together[:, :2])


def test_a_seed_may_be_as_large_as_recipes_allow():
    assert row_uniforms(2**64 - 1, 0, [[1]], [0], 2).shape == (1, 2)
    assert row_seed(2**64 - 1, 0, [1], 0) != row_seed(2**63 - 1, 0, [1], 0)


@pytest.mark.parametrize("change", [{"seed": 4}, {"step": 10}, {"sample_ids": [1]}, {"prompt_ids": [[6, 5]]}])
def test_uniforms_change_with_each_part_of_the_key(change):
    key = {"seed": 3, "step": 9, "prompt_ids": [[5, 6]], "sample_ids": [0]}
    assert not np.array_equal(row_uniforms(**key, num_draws=3), row_uniforms(**(key | change), num_draws=3))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_frequencies_are_the_probabilities(temperature):
    tokens, logprobs = _sample(50_000, temperature=temperature)
    expected = torch.log_softmax(LOGITS / temperature, dim=-1)
    assert _chi_square(tokens, expected.exp()) < 18.5  # 4 degrees of freedom, p = 0.001
    torch.testing.assert_close(logprobs, expected[tokens])


def test_top_k_restricts_and_renormalises_but_not_the_logprobs():
    tokens, logprobs = _sample(50_000, top_k=2)
    kept = torch.softmax(LOGITS[:2], dim=-1)
    assert _chi_square(tokens, torch.cat([kept, torch.zeros(3)])) < 10.9  # 1 degree of freedom, p = 0.001
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS, dim=-1)[tokens])


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    probs = torch.softmax(LOGITS, dim=-1)  # 0.598, 0.220, 0.133, 0.030, 0.004 of the sum
    for top_p, num_kept in ((0.1, 1), (float(probs[0]) + 0.01, 2), (float(probs[:2].sum()) - 0.01, 2), (0.999, 5)):
        tokens, _ = _sample(20_000, top_p=top_p)
        assert sorted(tokens.unique().tolist()) == list(range(num_kept))


def test_top_p_counts_within_top_k():
    probs = torch.softmax(LOGITS[:3], dim=-1)
    tokens, _ = _sample(20_000, top_k=3, top_p=float(probs[:2].sum()) - 0.01)
    assert sorted(tokens.unique().tolist()) == [0, 1]
    everything, _ = _sample(20_000, top_k=50)
    assert sorted(everything.unique().tolist()) == [0, 1, 2, 3, 4]


def test_tokens_of_probability_zero_are_never_chosen():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf]]).expand(4, -1)
    uniforms = torch.tensor([0.0, 0.5 - 1e-12, 0.5, 1 - 2**-53], dtype=torch.float64)
    tokens, _ = choose_tokens(logits, uniforms, temperature=1.0, top_k=None, top_p=1.0)
    assert tokens.tolist() == [1, 1, 3, 3]


def test_temperature_zero_is_greedy_with_logprobs_of_temperature_one():
    tokens, logprobs = _sample(4, temperature=0.0, top_k=3, top_p=0.5)
    assert tokens.tolist() == [0] * 4
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS, dim=-1)[0].expand(4))


def test_logprobs_of_half_precision_logits_are_float32():
    logits = torch.randn(3, 50, dtype=torch.bfloat16)
    tokens, logprobs = choose_tokens(logits, torch.rand(3).double(), temperature=1.0, top_k=None, top_p=1.0)
    assert logprobs.dtype == torch.float32
    expected = torch.log_softmax(logits.double(), dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, expected.float(), atol=1e-5, rtol=0)


on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@on_each_device
def test_whole_storages_come_back_to_their_addresses(device):
    whole = torch.arange(10, device=device)
    other = torch.ones(3, 2, dtype=torch.bool, device=device)
    saved = SavedMemory([whole[3:5], whole[:2], other.T])
    assert saved.nbytes == 10 * 8 + 6
    saved.restore()  # nothing has been saved
    for number in range(2):
        whole[7] = number
        saved.save()
        whole.zero_()
        other.zero_()
        saved.restore()  # must come before the next computation
        assert whole.tolist() == [0, 1, 2, 3, 4, 5, 6, number, 8, 9]
        assert other.all()
        whole[0] = 0
        saved.restore()  # a second restore does nothing


@on_each_device
@pytest.mark.parametrize("size", [0, 1, 7, 8, 4096, 4099])  # whole words of eight bytes, and others
def test_only_what_is_not_zero_is_copied_and_every_bit_comes_back(device, size):
    zeros, ones = (torch.full((size,), value, dtype=torch.uint8, device=device) for value in (0, 1))
    saved = SavedMemory([zeros, ones])
    for _ in range(2):
        saved.save()
        assert saved.host_nbytes == size  # of the ones
        zeros.fill_(255)
        ones.fill_(255)
        saved.restore()
        assert zeros.tolist() == [0] * size
        assert ones.tolist() == [1] * size


@on_each_device
@pytest.mark.parametrize("last", [-0.0, math.nan, 2.0**-149])
def test_zeros_become_other_values_and_zeros_again(device, last):
    state = torch.zeros(1001, device=device)
    saved = SavedMemory([state])
    for value, host_nbytes in ((0.0, 0), (last, 4004), (0.0, 4004), (1.0, 4004)):
        state.zero_()
        state[-1] = value
        before = state.view(torch.int32).tolist()
        saved.save()
        assert saved.host_nbytes == host_nbytes
        state.fill_(-1)
        saved.restore()
        assert state.view(torch.int32).tolist() == before
