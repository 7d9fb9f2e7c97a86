"""What users read of recipes: each case of the golden file, and that each rule has one that breaks it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_offload_rl.config import load
from nemo_offload_rl.config.rules import RULES
from tests.unit.config.conftest import CONFIGS, GOLDEN

OTHERS = ("test_", "accepted: ", "text: ", "override: ")
WRONG = {group: cases for group, cases in GOLDEN.items() if not group.startswith(OTHERS)}
ACCEPTED = {group: cases for group, cases in GOLDEN.items() if group.startswith("accepted: ")}


def each_of(groups: dict[str, dict[str, str]]) -> Callable:
    cases = [pytest.param(name, case, id=f"{name}-{n}") for name in groups for n, case in enumerate(groups[name])]
    return pytest.mark.parametrize(("group", "case"), cases)


@each_of(WRONG)
@pytest.mark.usefixtures("installed_vllm")
def test_a_wrong_recipe_is_answered_with_keys_and_remedies(group, case, error_of):
    recipe, *overrides = case.split()
    error_of(*overrides, recipe=CONFIGS / recipe, group=group)


@each_of(ACCEPTED)
@pytest.mark.usefixtures("installed_vllm")
def test_an_accepted_recipe_has_its_notes_and_no_others(group, case, golden):
    recipe, *overrides = case.split()
    golden(group, case, "\n".join(load(CONFIGS / recipe, overrides).notes))


def test_each_rule_has_a_recipe_that_breaks_it():
    names = {rule.check.__name__ for rule in RULES if hasattr(rule.check, "__name__")}
    assert names - WRONG.keys() == {"offloading_megatron_core_version"}  # whose test pretends another version


def test_groups_named_for_tests_have_one():
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [group for group in GOLDEN if group.startswith("test_") and f"def {group}(" not in sources] == []
