"""Tests the benchmarks of plans, and the plan against their results."""

import json
from pathlib import Path

import fit_choice
import plan_accuracy
import pytest
import torch

from nemo_offload_rl.config import load
from nemo_offload_rl.placement.rates import H200_RATES, Rates
from nemo_offload_rl.residency.table import Phase
from tests.unit.plan.test_activation_memory import machine

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
GRPO = ROOT / "benchmarks" / "recipes" / "grpo_1_5B_random.yaml"


def test_a_grpo_run_of_answers_of_many_lengths_took_what_is_planned():
    """The run chose rows of 32,768 tokens."""
    rows = [f"policy.sequence_packing.{key}_mb_tokens=32768" for key in ("train", "logprob")]
    config = load(GRPO, [*rows, "policy.generation.backend=vllm"]).config
    planned = {phase: gib for phase, (gib, _) in plan_accuracy.planned_phases(config).items()}
    for line in (RESULTS / "colocated_auto_rows.jsonl").read_text().splitlines():
        peaks = json.loads(line)
        for phase, verb in ((Phase.TRAIN, "train"), (Phase.LOGPROB, "logprobs")):
            assert planned[phase] == pytest.approx(peaks[f"performance/memory/policy/gpu_peak_{verb}_gib"], rel=0.01)


def test_the_plan_is_near_the_peaks_that_were_measured():
    ratios = {}
    for row in json.loads((RESULTS / "plan_accuracy.json").read_text())["rows"]:
        planned = plan_accuracy.planned_phases(plan_accuracy.CASES[row["case"]].config(has_gpus=True))
        gib, _ = planned[Phase(row["phase"])]
        ratios[row["case"], row["phase"]] = gib / row["measured_gib"]
    assert {case for case, _ in ratios} == plan_accuracy.CASES.keys() - {"tiny"}
    outside = {row: ratio for row, ratio in ratios.items() if not 0.97 <= ratio <= 1.06}
    assert not outside


def test_planned_seconds_are_within_15_percent_of_those_measured():
    result = json.loads((RESULTS / "plan_accuracy.json").read_text())
    rates = Rates.from_fields(result["rates"])
    outside = []
    for row in result["rows"]:
        planned = plan_accuracy.planned_phases(plan_accuracy.CASES[row["case"]].config(has_gpus=True), rates)
        _, seconds = planned[Phase(row["phase"])]
        if not 0.85 <= seconds / row["measured_s"] <= 1.15:
            outside.append((row["case"], row["phase"]))
    assert outside == [("qwen2-1.5b-cpu-optimizer", "logprob")]  # the GPU waits for the host


@pytest.mark.parametrize("name", ["1.5b-32768", "8b-8192"])
def test_no_setting_by_hand_is_predicted_to_be_faster_than_the_choice(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fit_choice, "host_facts", lambda: machine(80).hosts[0])
    monkeypatch.setattr(fit_choice, "rates_here", lambda: H200_RATES)
    found = {setting: seconds for setting, (_, seconds) in fit_choice.settings_of(fit_choice.CASES[name]).items()}
    assert len(found) > 4
    assert min(found.values()) == found["fit"]
