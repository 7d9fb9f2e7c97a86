"""Mutated recipes, structures and overrides: refused with a message, or accepted with nothing of them ignored."""

import sys

import pytest
from support.fuzz_run import run_cases


@pytest.mark.slow
def test_mutated_recipes(request):
    whole = request.config.getoption("--fuzz")
    report = run_cases("recipes", request.config.getoption("--fuzz-seed"), 2000 if whole else 80)
    sys.stdout.write(f"{report}\n")  # pytest -rP shows it
    assert not report.failures, "\n\n".join([str(report), *report.failures])
    assert report.accepted > report.refused // 20
    assert report.refused > report.accepted
