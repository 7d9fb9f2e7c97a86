"""Tests the fuzzer itself: it must find each kind of failure."""

import pytest
from support import fuzz_recipes
from support.fuzz_recipes import Case
from support.fuzz_run import PropertyError, run_cases

from nemo_offload_rl.config import load


@pytest.fixture(scope="module")
def validated():
    return load(fuzz_recipes.CONFIGS / "sft_tiny_cpu.yaml")


def test_a_value_that_was_dropped_is_seen(validated):
    with pytest.raises(PropertyError, match=r"sft\.seed is 12345 in the file and 4 in the recipe"):
        fuzz_recipes._check_nothing_ignored(Case({"sft": {"seed": 12345}}, ""), validated)
    with pytest.raises(PropertyError, match=r"sft\.seed was set to 3, and is 4"):
        fuzz_recipes._check_nothing_ignored(Case(None, "", given={"sft.seed": 3}), validated)
    fuzz_recipes._check_nothing_ignored(Case({"sft": {"seed": 4}}, ""), validated)


def test_a_key_that_is_not_used_is_seen(validated):
    validated = load(fuzz_recipes.CONFIGS / "sft_tiny_cpu.yaml")
    validated.recipe.config["sft"]["sead"] = 1
    with pytest.raises(PropertyError, match=r"sft\.sead: 1 is accepted, and neither used nor in a note"):
        fuzz_recipes._check_nothing_ignored(Case(None, ""), validated)
    validated.config["sft"]["sead"] = 1
    with pytest.raises(PropertyError, match=r"sft\.sead is accepted, and sft\.sead is no key"):
        fuzz_recipes._check_nothing_ignored(Case(None, ""), validated)


def test_each_fate_of_a_case_is_told_apart():
    report = run_cases("self", 1, 6)
    assert (report.accepted, report.refused) == (1, 1)
    assert [failure.split(":")[0] for failure in report.failures] == [f"case {case} of seed 1" for case in (2, 3, 4, 5)]
    for word, failure in zip(
        ("ZeroDivisionError", "the process ended (-9)", "MemoryError", "_TooSlow"), report.failures, strict=True
    ):
        assert word in failure
    assert 0.5 < report.slowest_s < 5
