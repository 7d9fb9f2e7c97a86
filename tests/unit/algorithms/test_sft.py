from dataclasses import replace

import pytest
import torch
from support.metrics_page import undocumented
from support.recorded_runs import SIX_STEPS, record, record_with_a_break
from support.toy_policy import PROBLEMS, TOKENIZER, ToyPolicy, table_logprobs

from nemo_offload_rl.algorithms.sft import SFT, ValidationData
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.train_loop import StopReason, StopTarget


def make(*, micro=4, max_tokens=8, validation=7) -> SFT:
    return SFT(
        policy=ToyPolicy(),
        example_format=PromptFormat(TOKENIZER, max_tokens),
        examples=ProblemLoader(PROBLEMS, shuffle=True, seed=3),
        validation=ValidationData(PROBLEMS[:7], validation, micro_batch_size=2),
        train_global_batch_size=4,
        train_micro_batch_size=micro,
        only_unmask_final=False,
        save_optimizer=True,
    )


def test_it_learns_and_stops_at_its_target():
    schedule = replace(SIX_STEPS, max_num_steps=200, target=StopTarget("validation/answer_probability", 0.8))
    reason, outputs = record(make(), schedule)
    last = outputs.rows[max(outputs.rows)]
    assert reason is StopReason.TARGET
    assert outputs.rows[0]["validation/answer_probability"] < 0.05
    assert last["validation/answer_probability"] >= 0.8
    assert last["validation/val_loss"] < 0.2 < outputs.rows[0]["validation/val_loss"]


def test_a_loss_is_a_target_from_above():
    schedule = replace(SIX_STEPS, max_num_steps=200, target=StopTarget("validation/val_loss", 0.5))
    _, outputs = record(make(), schedule)
    losses = [row["validation/val_loss"] for row in outputs.rows.values() if "validation/val_loss" in row]
    assert losses[-1] <= 0.5 < losses[-2]


def test_validation_measures_what_recipes_may_name():
    assert set(make().validate(0)) == {f"validation/{name}" for name in ALGORITHMS["sft"].validation_metrics}


def test_answer_probability_is_that_of_sampling_the_answer():
    sft = make()
    table = sft._policy.table.detach()
    expected = 0.0
    for problem in PROBLEMS[:7]:
        ids = torch.tensor([TOKENIZER(problem.prompt + problem.answer)["input_ids"] + [TOKENIZER.eos_token_id]])
        expected += table_logprobs(table, ids)[0, 2:].sum().exp().item() / 7
    assert sft.validate(0)["validation/answer_probability"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("max_tokens", [8, 4])  # with 4, no example fits
def test_validation_in_batches_has_the_values_of_one_batch(max_tokens, monkeypatch):
    whole, parts = (make(max_tokens=max_tokens, validation=size) for size in (7, 3))
    monkeypatch.setattr(PromptFormat, "examples", None)  # all has been tokenized by now
    for _ in range(2):
        assert parts.validate(0) == pytest.approx(whole.validate(0), rel=1e-5)
    assert parts._policy.calls == ["evaluate"] * 6
    assert [batch.size for batch in parts._validation_batches] == [3, 3, 1]


def test_a_step_and_a_validation_ask_all_ranks_once():
    sft = make()
    sft.step(1, Timer())
    sft.validate(1)
    assert sft._policy.calls == ["train", "evaluate"]


def test_a_step_reports_what_moved():
    metrics = make().step(1, Timer())
    assert {name: value for name, value in metrics.items() if name.startswith("residency/")} == {
        "residency/train/enter_s": 0.1,
        "residency/train/optimizer_state/copy_s": 0.1,
        "residency/train/optimizer_state/exposed_s": 0.025,
        "residency/train/optimizer_state/hidden_s": pytest.approx(0.075),
        "residency/train/optimizer_state/gb": 4.0,
        "residency/train/optimizer_state/gb_per_s": 40.0,
        "residency/host_rss_gib": 1.0,
    }


def test_every_metric_of_a_run_is_documented():
    _, outputs = record(make())
    names = {name for row in outputs.rows.values() for name in row}
    assert "validation/val_loss" in names
    assert undocumented(names) == []


def test_only_answers_are_trained_on():
    sft = make()
    before = sft._policy.table.detach().clone()
    sft.step(1, Timer())
    changed = (sft._policy.table != before).any(dim=1).nonzero().flatten().tolist()
    equals = TOKENIZER.convert_tokens_to_ids("=")
    # Trained are the token after "digit =" and the one after "= digit"; not "=" after the digit that begins a prompt.
    assert all(index // 14 == equals or index % 14 == equals for index in changed)
    assert not any(index // 14 == 0 and index % 14 != equals for index in changed)


def test_examples_that_do_not_fit_are_left_out():
    metrics = make(max_tokens=3).step(1, Timer())  # prompt, answer and end of sequence are four tokens
    assert metrics["train/num_valid_samples"] == 0
    assert metrics["train/loss"] == 0


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    _, whole = record(make())
    assert record_with_a_break(make, tmp_path, "validation/val_loss") == whole.without_timings()


def test_microbatches_do_not_change_the_run():
    _, whole = record(make(micro=4))
    _, pieces = record(make(micro=1))
    for step, row in whole.without_timings().items():
        assert pieces.without_timings()[step] == pytest.approx(row, rel=1e-4, abs=1e-6)


def test_epochs_end_a_run():
    reason, outputs = record(make(), replace(SIX_STEPS, max_num_steps=100, max_num_epochs=2))
    assert reason is StopReason.EPOCHS
    assert max(outputs.rows) == 4  # two batches of four from ten problems, twice
    assert "validation/val_loss" in outputs.rows[4]
