"""Which groups leave with a fraction."""

import random

import pytest

from nemo_offload_rl.activation_offload.schedule import which_leave, which_leave_unknown


def test_they_leave_a_layer_ahead_of_an_even_pace():
    assert which_leave([[8, 8]] * 4, 0.5) == [True, True, False, True, False, True, False, False]
    assert which_leave([[8]] * 6, 0.5) == [True, False, True, False, True, False]


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.77, 1.0])
def test_what_leaves_is_the_fraction_to_within_a_group(fraction):
    chance = random.Random(0)
    for _ in range(50):
        layers = [[chance.randint(1, 9) for _ in range(chance.randint(1, 4))] for _ in range(chance.randint(1, 20))]
        sizes = [nbytes for layer in layers for nbytes in layer]
        leaves = which_leave(layers, fraction)
        left = sum(nbytes for nbytes, goes in zip(sizes, leaves, strict=True) if goes)
        assert fraction * sum(sizes) - 9 <= left <= fraction * sum(sizes)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.77, 1.0])
def test_in_the_first_pass_no_more_than_the_fraction_has_left_at_any_group(fraction):
    chance = random.Random(0)
    for _ in range(50):
        sizes = [chance.randint(1, 9) for _ in range(chance.randint(1, 40))]
        seen = left = 0
        for nbytes, goes in zip(sizes, which_leave_unknown([sizes], fraction), strict=True):
            seen += nbytes
            left += nbytes if goes else 0
            assert fraction * seen - 9 <= left <= fraction * seen


def test_nothing_can_leave():
    assert which_leave([], 1.0) == which_leave([[], []], 0.5) == which_leave_unknown([[]], 0.5) == []
