"""Tests steps and validations of SFT and DPO with a toy policy, in one process."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from support.metrics_page import undocumented
from support.recorded_runs import SIX_STEPS, record, record_with_a_break
from support.toy_policy import PROBLEMS, TOKENIZER, ToyPolicy, table_logprobs

from nemo_offload_rl.algorithms.dpo import DPO, PairBatchSizes
from nemo_offload_rl.algorithms.losses import DPOLoss
from nemo_offload_rl.algorithms.sft import SFT, ValidationData
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import Message
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.train_loop import StopReason, StopTarget

# Repeat the digit; the rejected answer is the next one.
PAIRS = [PreferencePair((Message("user", f"{n}="),), str(n), str((n + 1) % 10)) for n in range(10)]
REFERENCE = "get_reference_policy_logprobs"


def make_sft(train=PROBLEMS, problems=PROBLEMS[:7], *, batch=4, micro=4, max_tokens=8, validation=7) -> SFT:
    return SFT(
        policy=ToyPolicy(),
        example_format=PromptFormat(TOKENIZER, max_tokens),
        examples=ProblemLoader(train, shuffle=True, seed=3),
        validation=ValidationData(problems, validation, micro_batch_size=2),
        train_global_batch_size=batch,
        train_micro_batch_size=micro,
        only_unmask_final=False,
        save_optimizer=True,
    )


def make_dpo(*, micro=4, max_tokens=8, validation=7) -> DPO:
    return DPO(
        policy=ToyPolicy(),
        answer_format=PromptFormat(TOKENIZER, max_tokens),
        pairs=ProblemLoader(PAIRS, shuffle=True, seed=3),
        validation=PAIRS[:7],
        loss_fn=DPOLoss(0.5, 1.0, 0.1, preference_average_log_probs=False, sft_average_log_probs=False),
        batch_sizes=PairBatchSizes(train_global=4, train_micro=micro, validation_global=validation, validation_micro=2),
        save_optimizer=True,
    )


MAKE = {"sft": make_sft, "dpo": make_dpo}
of_both = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def test_sft_learns_and_stops_at_its_target():
    schedule = replace(SIX_STEPS, max_num_steps=200, target=StopTarget("validation/answer_probability", 0.8))
    reason, outputs = record(make_sft(), schedule)
    last = outputs.rows[max(outputs.rows)]
    assert reason is StopReason.TARGET
    assert outputs.rows[0]["validation/answer_probability"] < 0.05
    assert last["validation/answer_probability"] >= 0.8
    assert last["validation/val_loss"] < 0.2 < outputs.rows[0]["validation/val_loss"]


def test_dpo_learns_what_is_preferred_and_stops_at_its_target():
    schedule = replace(SIX_STEPS, max_num_steps=200, target=StopTarget("validation/accuracy", 1.0))
    reason, outputs = record(make_dpo(), schedule)
    first, last = outputs.rows[0], outputs.rows[max(outputs.rows)]
    assert reason is StopReason.TARGET
    assert first["validation/accuracy"] == 0  # the untrained policy prefers no answer
    assert first["validation/preference_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert last["validation/accuracy"] == 1
    assert last["validation/rewards_margin_mean"] > 0.5
    assert last["validation/logprobs_chosen_mean"] > first["validation/logprobs_chosen_mean"]


def test_a_loss_is_a_target_from_above():
    schedule = replace(SIX_STEPS, max_num_steps=200, target=StopTarget("validation/val_loss", 0.5))
    _, outputs = record(make_sft(), schedule)
    losses = [row["validation/val_loss"] for row in outputs.rows.values() if "validation/val_loss" in row]
    assert losses[-1] <= 0.5 < losses[-2]


@pytest.mark.parametrize("name", MAKE)
def test_validation_measures_what_recipes_may_name_and_every_metric_is_documented(name):
    _, outputs = record(MAKE[name]())
    names = {name for row in outputs.rows.values() for name in row}
    measured = {f"validation/{metric}" for metric in ALGORITHMS[name].validation_metrics}
    assert set(MAKE[name]().validate(0)) == measured <= names
    assert undocumented(names) == []


def test_answer_probability_is_that_of_sampling_the_answer():
    sft = make_sft()
    table = sft._policy.table.detach()
    expected = 0.0
    for problem in PROBLEMS[:7]:
        ids = torch.tensor([TOKENIZER(problem.prompt + problem.answer)["input_ids"] + [TOKENIZER.eos_token_id]])
        expected += table_logprobs(table, ids)[0, 2:].sum().exp().item() / 7
    assert sft.validate(0)["validation/answer_probability"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("max_tokens", [8, 3])  # with 3, nothing fits
@of_both
def test_validation_in_batches_has_the_values_of_one_batch(make, max_tokens, monkeypatch):
    whole, parts = (make(max_tokens=max_tokens, validation=size) for size in (7, 3))
    monkeypatch.setattr(PromptFormat, "examples", None)  # all has been tokenized by now
    for algorithm in (whole, parts):
        algorithm._policy.table.data[3] += torch.arange(14) / 14  # no longer the reference
    for _ in range(2):
        assert parts.validate(0) == pytest.approx(whole.validate(0), rel=1e-5, nan_ok=max_tokens == 3)
    assert parts._policy.calls == [REFERENCE] * 3 * (make is make_dpo) + ["evaluate"] * 6


@of_both
def test_a_validation_of_nothing_is_no_perfect_one(make, caplog):
    caplog.set_level(logging.WARNING)
    algorithm = make(max_tokens=3)
    metrics = algorithm.validate(0)
    assert metrics.pop("validation/num_overlong_pairs", 7) == 7
    assert all(math.isnan(value) for value in metrics.values())
    assert not StopTarget("validation/val_loss", 1.0).is_reached(metrics)
    [record] = caplog.records
    assert record.message == (
        "The validation measures nothing: none of its samples counts, since all are longer than "
        "data.max_input_seq_length or have no token to train; raise that limit, or take other validation data."
    )


def test_each_verb_asks_all_ranks_once():
    sft, dpo = make_sft(), make_dpo()
    sft.step(1, Timer())
    sft.validate(1)
    assert sft._policy.calls == ["train", "evaluate"]
    dpo.validate(0)
    metrics = dpo.step(1, Timer())
    dpo.validate(1)
    assert dpo._policy.calls == [REFERENCE, "evaluate", REFERENCE, "train", "evaluate"]
    # The first step starts from the reference.
    assert (metrics["train/rewards_margin_mean"], metrics["train/num_valid_samples"]) == (0, 4)
    assert metrics["train/loss"] == pytest.approx(0.6931 + 0.1 * metrics["train/sft_loss"], abs=1e-4)


def test_a_step_reports_what_moved():
    moved = {"copy_s": 0.1, "exposed_s": 0.025, "hidden_s": pytest.approx(0.075), "gb": 4.0, "gb_per_s": 40.0}
    metrics = make_sft().step(1, Timer())
    assert {name: value for name, value in metrics.items() if name.startswith("residency/")} == {
        "residency/train/enter_s": 0.1,
        "residency/host_rss_gib": 1.0,
        **{f"residency/train/optimizer_state/{name}": value for name, value in moved.items()},
    }


@of_both
def test_only_answers_are_trained_on(make):
    algorithm = make()
    before = algorithm._policy.table.detach().clone()
    algorithm.step(1, Timer())
    changed = (algorithm._policy.table != before).any(dim=1).nonzero().flatten().tolist()
    equals = TOKENIZER.convert_tokens_to_ids("=")
    assert changed
    # Trained are the token after "digit =" and the one after "= digit"; not "=" after the digit that begins a prompt.
    assert all(index // 14 == equals or index % 14 == equals for index in changed)
    assert not any(index // 14 == 0 and index % 14 != equals for index in changed)


@of_both
def test_what_does_not_fit_is_left_out(make):
    metrics = make(max_tokens=3).step(1, Timer())  # prompt, answer and end of sequence are four tokens
    assert metrics.get("train/num_overlong_pairs", 4) == 4
    assert (metrics["train/num_valid_samples"], metrics["train/loss"]) == (0, 0)


@of_both
def test_a_resumed_run_goes_on_bit_for_bit_from_the_same_reference(make, tmp_path):
    def is_not_the_reference(algorithm):
        assert not torch.equal(algorithm._policy.table, algorithm._policy.reference)

    _, whole = record(make())
    metric = "validation/loss" if make is make_dpo else "validation/val_loss"
    rows = record_with_a_break(make, tmp_path, metric, is_not_the_reference)
    assert rows == whole.without_timings()


@of_both
def test_microbatches_do_not_change_the_run(make):
    _, whole = record(make(micro=4))
    _, pieces = record(make(micro=1))
    for step, row in whole.without_timings().items():
        assert pieces.without_timings()[step] == pytest.approx(row, rel=1e-4, abs=1e-6)


def test_epochs_end_a_run():
    reason, outputs = record(make_sft(), replace(SIX_STEPS, max_num_steps=100, max_num_epochs=2))
    assert reason is StopReason.EPOCHS
    assert max(outputs.rows) == 4  # two batches of four from ten problems, twice
    assert "validation/val_loss" in outputs.rows[4]
