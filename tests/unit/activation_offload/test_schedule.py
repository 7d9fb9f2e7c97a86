"""Tests which groups are offloaded at a fraction."""

import random

import pytest

from nemo_offload_rl.activation_offload.schedule import choose_in_first_pass, choose_offloaded


def test_they_leave_a_layer_ahead_of_an_even_pace():
    assert choose_offloaded([[8, 8]] * 4, 0.5) == [True, True, False, True, False, True, False, False]
    assert choose_offloaded([[8]] * 6, 0.5) == [True, False, True, False, True, False]
    assert choose_offloaded([], 1.0) == choose_offloaded([[], []], 0.5) == choose_in_first_pass([[]], 0.5) == []


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.77, 1.0])
def test_what_leaves_is_the_fraction_to_within_a_group(fraction):
    chance = random.Random(0)
    for _ in range(50):
        layers = [[chance.randint(1, 9) for _ in range(chance.randint(1, 4))] for _ in range(chance.randint(1, 20))]
        sizes = [nbytes for layer in layers for nbytes in layer]
        leaves = choose_offloaded(layers, fraction)
        left = sum(nbytes for nbytes, goes in zip(sizes, leaves, strict=True) if goes)
        assert fraction * sum(sizes) - 9 <= left <= fraction * sum(sizes)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.77, 1.0])
def test_in_the_first_pass_no_more_than_the_fraction_has_left_at_any_group(fraction):
    chance = random.Random(0)
    for _ in range(50):
        sizes = [chance.randint(1, 9) for _ in range(chance.randint(1, 40))]
        seen = left = 0
        for nbytes, goes in zip(sizes, choose_in_first_pass([sizes], fraction), strict=True):
            seen += nbytes
            left += nbytes if goes else 0
            assert fraction * seen - 9 <= left <= fraction * seen
