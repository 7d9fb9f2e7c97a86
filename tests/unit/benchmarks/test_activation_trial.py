"""Tests batches of benchmarks/activation_offload.py, and one of its runs that offloads nothing, on CPU or GPU."""

from dataclasses import replace

import pytest
from activation_cases import batches
from activation_cases.combinations import Combination
from activation_cases.trial import first_difference, run_trial

SMALL = (
    "policy.hf_config.num_hidden_layers=1",
    "policy.hf_config.hidden_size=64",
    "policy.hf_config.intermediate_size=64",
    "policy.max_total_sequence_length=16",
)


@pytest.mark.slow
def test_a_run_is_equal_to_itself_and_not_to_one_with_phases_of_other_batches():
    combination = Combination("tiny_dense", micro_batches="changing", extra=SMALL)
    plain = run_trial(combination, 3)
    assert first_difference(run_trial(replace(combination, phases=True), 3), plain) is None
    assert plain.num_micro_batches == tuple(batches.num_micro_batches("changing", step) for step in range(3))
    other = run_trial(replace(combination, micro_batches="1"), 3)
    assert "step 1: loss" in (first_difference(other, plain) or "")
