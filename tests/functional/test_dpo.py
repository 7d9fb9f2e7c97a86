"""Runs a shortened DPO recipe as a user does."""

import json
import shutil

import pytest
from support.examples import run_example

pytestmark = pytest.mark.slow

SHORT_DPO = [
    "~warm_start", "dpo.max_num_steps=12", "dpo.val_period=6", "policy.train_global_batch_size=32",
    "policy.train_micro_batch_size=16", "policy.megatron_cfg.optimizer.lr=1e-3", "checkpointing.save_period=6",
]  # fmt: skip


def test_a_run_learns_to_prefer_and_one_that_resumes_from_its_middle_ends_alike(tmp_path):
    whole = run_example("run_dpo.py", tmp_path, SHORT_DPO)
    assert whole.status == 0, whole.output
    metrics = whole.metrics()
    assert metrics[0]["validation/accuracy"] == 0
    assert metrics[12]["validation/accuracy"] > 0.55
    assert metrics[12]["train/rewards_margin_mean"] > 0 == metrics[1]["train/rewards_margin_mean"]

    shutil.rmtree(tmp_path / "checkpoints" / "step_12")
    log = whole.folder / "logs" / "exp_001" / "metrics.jsonl"
    log.write_text("".join(f"{line}\n" for line in log.read_text().splitlines() if json.loads(line)["step"] <= 6))
    resumed = run_example("run_dpo.py", tmp_path, SHORT_DPO)
    assert resumed.status == 0, resumed.output
    assert whole.metrics() == metrics
