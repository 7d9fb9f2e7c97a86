"""Tests the benchmark of what `plan --fit` chooses."""

import fit_choice
import pytest
import torch
from fit_choice import CASES

from nemo_offload_rl.placement.rates import H200_RATES
from tests.unit.plan.test_activation_memory import machine


@pytest.mark.parametrize("name", ["1.5b-32768", "8b-8192"])
def test_no_setting_by_hand_is_predicted_to_be_faster_than_the_choice(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fit_choice, "host_facts", lambda: machine(80).hosts[0])
    monkeypatch.setattr(fit_choice, "rates_here", lambda: H200_RATES)
    found = {setting: seconds for setting, (_, seconds) in fit_choice.settings_of(CASES[name]).items()}
    assert len(found) > 4
    assert min(found.values()) == found["fit"]


def test_a_setting_is_compared_with_the_fastest_by_hand():
    rows = [{"case": "a", "setting": setting, "measured_s": s} for setting, s in (("fit", 1.5), ("x", 2.0), ("y", 1.0))]
    assert [row["of_best"] for row in fit_choice.with_ratios(rows)] == [1.5, 2.0, 1.0]
