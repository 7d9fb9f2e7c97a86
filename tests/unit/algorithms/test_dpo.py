"""Tests DPO's steps and validations with a toy policy, in one process."""

from dataclasses import replace

import pytest
import torch
from support.metrics_page import undocumented
from support.recorded_runs import SIX_STEPS, record, record_with_a_break
from support.toy_policy import TOKENIZER, ToyPolicy

from nemo_offload_rl.algorithms.dpo import DPO, PairBatchSizes
from nemo_offload_rl.algorithms.losses import DPOLoss
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import Message
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.train_loop import StopReason, StopTarget

# Repeat the digit; the rejected answer is the next one.
PAIRS = [
    PreferencePair((Message("user", f"{digit}="),), str(digit), str((digit + 1) % 10)) for digit in range(10)
]  # fmt: skip


def make(*, micro=4, max_tokens=8, validation=7) -> DPO:
    return DPO(
        policy=ToyPolicy(),
        answer_format=PromptFormat(TOKENIZER, max_tokens),
        pairs=ProblemLoader(PAIRS, shuffle=True, seed=3),
        validation=PAIRS[:7],
        loss_fn=DPOLoss(0.5, 1.0, 0.1, preference_average_log_probs=False, sft_average_log_probs=False),
        batch_sizes=PairBatchSizes(train_global=4, train_micro=micro, validation_global=validation, validation_micro=2),
        save_optimizer=True,
    )


def test_it_learns_what_is_preferred_and_stops_at_its_target():
    schedule = replace(SIX_STEPS, max_num_steps=200, target=StopTarget("validation/accuracy", 1.0))
    reason, outputs = record(make(), schedule)
    first, last = outputs.rows[0], outputs.rows[max(outputs.rows)]
    assert reason is StopReason.TARGET
    assert first["validation/accuracy"] == 0  # the untrained policy prefers no answer
    assert first["validation/preference_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert last["validation/accuracy"] == 1
    assert last["validation/rewards_margin_mean"] > 0.5
    assert last["validation/logprobs_chosen_mean"] > first["validation/logprobs_chosen_mean"]


def test_the_first_step_starts_from_the_reference():
    metrics = make().step(1, Timer())
    assert metrics["train/rewards_margin_mean"] == 0
    assert metrics["train/num_valid_samples"] == 4
    assert metrics["train/loss"] == pytest.approx(0.6931 + 0.1 * metrics["train/sft_loss"], abs=1e-4)


def test_validation_measures_what_recipes_may_name():
    assert set(make().validate(0)) == {f"validation/{name}" for name in ALGORITHMS["dpo"].validation_metrics}


def test_the_reference_is_asked_once_a_step_and_once_for_all_validations():
    dpo = make()
    dpo.validate(0)
    dpo.step(1, Timer())
    dpo.validate(1)
    reference = "get_reference_policy_logprobs"
    assert dpo._policy.calls == [reference, "evaluate", reference, "train", "evaluate"]


@pytest.mark.parametrize("max_tokens", [8, 3])  # with 3, no pair fits
def test_validation_in_batches_has_the_values_of_one_batch(max_tokens, monkeypatch):
    whole, parts = (make(max_tokens=max_tokens, validation=size) for size in (7, 3))
    monkeypatch.setattr(PromptFormat, "examples", None)  # all has been tokenized by now
    for dpo in (whole, parts):
        dpo._policy.table.data[3] += torch.arange(14) / 14  # no longer the reference
    for _ in range(2):
        assert parts.validate(0) == pytest.approx(whole.validate(0), rel=1e-5)
    assert parts._policy.calls == ["get_reference_policy_logprobs"] * 3 + ["evaluate"] * 6


def test_every_metric_of_a_run_is_documented():
    _, outputs = record(make())
    names = {name for row in outputs.rows.values() for name in row}
    assert {"validation/accuracy", "train/num_overlong_pairs", "timing/train/reference_logprobs"} <= names
    assert undocumented(names) == []


def test_only_answers_are_trained_on():
    dpo = make()
    before = dpo._policy.table.detach().clone()
    dpo.step(1, Timer())
    changed = (dpo._policy.table != before).any(dim=1).nonzero().flatten().tolist()
    equals = TOKENIZER.convert_tokens_to_ids("=")
    assert changed
    assert all(index // 14 == equals or index % 14 == equals for index in changed)


def test_pairs_that_do_not_fit_are_left_out_and_counted():
    metrics = make(max_tokens=3).step(1, Timer())  # prompt, answer and end of sequence are four tokens
    assert metrics["train/num_overlong_pairs"] == 4
    assert metrics["train/num_valid_samples"] == 0
    assert metrics["train/loss"] == 0


def test_a_resumed_run_goes_on_bit_for_bit_from_the_same_reference(tmp_path):
    def is_not_the_reference(dpo):
        assert not torch.equal(dpo._policy.table, dpo._policy.reference)

    _, whole = record(make())
    rows = record_with_a_break(make, tmp_path, "validation/loss", is_not_the_reference)
    assert rows == whole.without_timings()


def test_microbatches_do_not_change_the_run():
    _, whole = record(make(micro=4))
    _, pieces = record(make(micro=1))
    for step, row in whole.without_timings().items():
        assert pieces.without_timings()[step] == pytest.approx(row, rel=1e-4, abs=1e-6)
