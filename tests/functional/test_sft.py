"""Runs a shortened SFT recipe as a user does."""

import pytest
import torch
from support.examples import run_example

pytestmark = pytest.mark.slow

SHORT_SFT = ["sft.max_num_steps=30", "policy.train_global_batch_size=32", "policy.train_micro_batch_size=16"]


def test_a_run_learns_and_its_export_answers_as_the_policy_did(tmp_path):
    from transformers import AutoModelForCausalLM

    done = run_example("run_sft.py", tmp_path, [*SHORT_SFT, "sft.export_hf=true"])
    assert done.status == 0, done.output
    metrics = done.metrics()
    assert metrics[30]["train/loss"] < 0.9 * metrics[1]["train/loss"]
    assert metrics[30]["validation/val_loss"] < 0.9 * metrics[0]["validation/val_loss"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "logs" / "exp_001" / "hf", dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) > 500_000
