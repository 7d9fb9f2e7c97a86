"""What users read of wrong recipes: each case of the golden file, and that each rule has one that breaks it."""

import pytest

from nemo_offload_rl.config.rules import RULES
from tests.unit.config.conftest import CONFIGS, GOLDEN

CASES = {group: cases for group, cases in GOLDEN.items() if not group.startswith("test_")}


@pytest.mark.parametrize(
    ("group", "case"),
    [
        pytest.param(group, case, id=f"{group}-{number}")
        for group, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
@pytest.mark.usefixtures("installed_vllm")
def test_a_wrong_recipe_is_answered_with_keys_and_remedies(group, case, error_of):
    recipe, *overrides = case.split()
    error_of(*overrides, recipe=CONFIGS / recipe, group=group)


def test_each_rule_has_a_recipe_that_breaks_it():
    names = {rule.check.__name__ for rule in RULES if hasattr(rule.check, "__name__")}
    assert names - CASES.keys() == {"offloading_megatron_core_version"}  # whose test pretends another version
