"""Mutates data files: each must be refused with a message, or read without any part being ignored or changed."""

import sys

import pytest
from support.fuzz_run import run_cases


@pytest.mark.slow
def test_mutated_data(request):
    whole = request.config.getoption("--fuzz")
    report = run_cases(request.config.getoption("--fuzz-seed"), 500 if whole else 120)
    sys.stdout.write(f"{report}\n")  # pytest -rP shows it
    assert not report.failures, str(report)
    assert report.accepted > report.refused // 20
    assert report.refused > report.accepted
