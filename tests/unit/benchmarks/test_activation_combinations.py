"""Tests the combinations that benchmarks/activation_offload.py compares with plain runs."""

import itertools

import pytest
from activation_cases.combinations import (
    ONE_AT_A_TIME,
    PAIRWISE,
    REFUSED,
    Combination,
    are_allowed,
    pairwise,
    several_gpus,
    single_gpu,
)
from activation_cases.cost import CASES
from activation_cases.longest import WAYS
from activation_cases.worker import policy

from nemo_offload_rl.config.problems import RecipeError

EVERY_MODEL = pytest.mark.parametrize("model", PAIRWISE)


def pairs(row):
    return set(itertools.combinations(row.items(), 2))


def test_all_pairs_of_independent_factors_meet_in_few_rows():
    levels = {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1], "d": [0, 1]}
    rows = pairwise(levels, lambda _: True)
    wanted = {
        ((one, x), (other, y))
        for one, other in itertools.combinations(levels, 2)
        for x in levels[one]
        for y in levels[other]
    }
    assert set().union(*map(pairs, rows)) == wanted
    assert 9 <= len(rows) <= 12  # of 36


@EVERY_MODEL
def test_every_pair_of_levels_that_can_meet_does(model):
    levels = PAIRWISE[model]
    everything = [dict(zip(levels, values, strict=True)) for values in itertools.product(*levels.values())]
    wanted = set().union(*(pairs(row) for row in everything if are_allowed(row)))
    rows = pairwise(levels, are_allowed)
    assert set().union(*map(pairs, rows)) == wanted
    assert all(are_allowed(row) for row in rows)


@EVERY_MODEL
@pytest.mark.parametrize("factor", ["modules", "fraction", "graphs", "delay", "micro_batches", "phases", "recompute"])
def test_every_level_is_tried_alone(model, factor):
    levels = ONE_AT_A_TIME[model]
    base = {name: choices[0] for name, choices in levels.items()}
    for level in levels[factor]:
        alone = base | {factor: level} | ({"graphs": levels["graphs"][1]} if factor == "delay" and level else {})
        same = [c for c in single_gpu() if c.model == model and all(getattr(c, n) == v for n, v in alone.items())]
        assert len(same) == 1, level


def test_the_plain_run_has_the_same_model_and_batches_and_nothing_else():
    combination = Combination(
        "tiny_moe", ("moe_act",), 0.5, ("attn",), True, "changing", phases=True, recompute=("layernorm",)
    )
    assert combination.plain() == Combination("tiny_moe", micro_batches="changing", recompute=("layernorm",))


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


def test_what_is_refused_is_not_refused_for_its_surroundings():
    for combination in REFUSED.values():
        policy(combination.model, Combination(combination.model, op_fuser=combination.op_fuser).overrides())
