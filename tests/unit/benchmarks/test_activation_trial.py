"""Tests batches of benchmarks/activation_offload.py, and one of its runs that offloads nothing, on CPU or GPU."""

from dataclasses import replace

import pytest
from activation_cases import batches
from activation_cases.combinations import Combination
from activation_cases.processes import run_processes
from activation_cases.trial import Step, Trial, first_difference, run_trial
from activation_cases.worker import Moved

from nemo_offload_rl.mcore.batches.microbatches import pack_bins

SMALL = (
    "policy.hf_config.num_hidden_layers=1",
    "policy.hf_config.hidden_size=64",
    "policy.hf_config.intermediate_size=64",
    "policy.max_total_sequence_length=16",
)


def test_micro_batches_change_from_step_to_step_and_take_every_number():
    numbers = [batches.num_micro_batches("changing", step) for step in range(10)]
    assert sorted(numbers[:5]) == sorted(numbers[5:]) == [2, 3, 4, 5, 6]
    assert numbers[:5] != numbers[5:]
    assert batches.num_micro_batches("4", 7) == 4


@pytest.mark.parametrize("num_bins", range(batches.FEWEST, batches.MOST + 1))
def test_samples_pack_into_as_many_rows_as_asked_for(num_bins):
    for seed in range(20):
        lengths = batches.packed_lengths(num_bins, 256, 128, seed)
        assert len(pack_bins(lengths, 256)) == num_bins
        assert max(lengths) <= 128
    assert batches.packed_lengths(num_bins, 256, 128, 0) != batches.packed_lengths(num_bins, 256, 128, 1)


def test_padded_rows_are_as_long_as_can_be_in_every_step():
    assert all(max(batches.padded_lengths(4, 128, seed)) == 128 for seed in range(5))
    data = batches.batch([8, 16], vocab_size=10, seed=0)
    assert data["token_mask"].sum(1).tolist() == [7, 14]
    assert data["input_ids"][0, 8:].tolist() == [0] * 8


@pytest.mark.slow
def test_a_run_is_equal_to_itself_and_not_to_one_with_phases_of_other_batches():
    combination = Combination("tiny_dense", micro_batches="changing", extra=SMALL)
    plain = run_trial(combination, 3)
    assert first_difference(run_trial(replace(combination, phases=True), 3), plain) is None
    assert plain.num_micro_batches == tuple(batches.num_micro_batches("changing", step) for step in range(3))
    other = run_trial(replace(combination, micro_batches="1"), 3)
    assert "step 1: loss" in (first_difference(other, plain) or "")


def a_trial(*steps: Step) -> Trial:
    return Trial(steps, Moved(), (1,), 0, 0)


def test_the_first_difference_is_named():
    one, two = Step(1.0, 2.0, (3, 4)), Step(0.5, 1.0, (5, 6))
    assert first_difference(a_trial(one, two), a_trial(one, two)) is None
    assert first_difference(a_trial(one, two), a_trial(one, replace(two, loss=0.25))) == "step 2: loss 0.5 for 0.25"
    changed = replace(two, checksums=(5, 7))
    assert first_difference(a_trial(one, changed), a_trial(one, two)) == "step 2: 1 of 2 parameters"
    skipped = Step(float("nan"), float("nan"), (3, 4))
    assert first_difference(a_trial(skipped), a_trial(skipped)) is not None


@pytest.mark.slow
def test_processes_answer_in_the_order_of_their_ranks():
    assert run_processes(divmod, 2, 3, timeout_s=120) == [(0, 0), (0, 1)]


@pytest.mark.slow
def test_what_a_process_raises_is_told():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run_processes(pow, 1, -1, timeout_s=120)


@pytest.mark.slow
def test_processes_that_take_too_long_are_ended():
    with pytest.raises(TimeoutError):
        run_processes(pow, 1, 2, timeout_s=0.0)
