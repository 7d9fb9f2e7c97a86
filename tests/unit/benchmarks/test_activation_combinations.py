"""Tests the combinations that benchmarks/activation_offload.py compares with plain runs."""

import pytest
from activation_cases.combinations import (
    REFUSED,
    several_gpus,
    single_gpu,
)
from activation_cases.cost import CASES
from activation_cases.longest import WAYS
from activation_cases.worker import policy

from nemo_offload_rl.config.problems import RecipeError


def test_validation_accepts_what_is_run():
    of_parity = [*single_gpu(), *(combination for _, combination in several_gpus().values())]
    of_cost = [case.settings for case in CASES.values()]
    for combination in [*of_parity, *of_cost, *WAYS.values()]:
        policy(combination.model, combination.overrides())


@pytest.mark.parametrize("name", REFUSED)
def test_validation_refuses_what_cannot_be_right(name):
    with pytest.raises(RecipeError) as caught:
        policy(REFUSED[name].model, REFUSED[name].overrides())
    assert len(caught.value.problems) == 1  # no other problem hides whether this one is still refused
