"""Runs a shortened SFT recipe as a user does."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from support.examples import ROOT, command, environment, run_example
from support.forked_python import forked_python

from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.model_check import cache
from nemo_offload_rl.model_check.alone import alone
from nemo_offload_rl.model_check.result import CheckResult, Difference
from nemo_offload_rl.model_check.twin import twin_config

pytestmark = pytest.mark.slow

SHORT_SFT = ["sft.max_num_steps=30", "policy.train_global_batch_size=32", "policy.train_micro_batch_size=16"]


def test_a_run_learns_and_its_export_answers_as_the_policy_did(tmp_path):
    from transformers import AutoModelForCausalLM

    done = run_example("run_sft.py", tmp_path, [*SHORT_SFT, "sft.export_hf=true"])
    metrics = done.metrics()
    assert metrics[30]["train/loss"] < 0.9 * metrics[1]["train/loss"]
    assert metrics[30]["validation/val_loss"] < 0.9 * metrics[0]["validation/val_loss"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "logs" / "exp_001" / "hf", dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) > 500_000


def test_a_run_does_all_its_steps_though_nobody_reads_what_it_prints(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)  # as `| less` does when one leaves it
    words = command("run_sft.py", tmp_path, [*SHORT_SFT, "sft.max_num_steps=2"], python=forked_python())
    done = subprocess.run(
        words, cwd=ROOT, env=environment(), stdout=writer, stderr=writer, timeout=300, check=False
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 0
    assert (
        "without its standard output, which cannot be written: Broken pipe"
        in (tmp_path / "logs" / "exp_001" / "run.log").read_text()
    )


SHORT_DPO = [
    "~warm_start", "dpo.max_num_steps=12", "dpo.val_period=6", "policy.train_global_batch_size=32",
    "policy.train_micro_batch_size=16", "policy.megatron_cfg.optimizer.lr=1e-3", "checkpointing.save_period=6",
]  # fmt: skip


def test_a_run_learns_to_prefer_and_one_that_resumes_from_its_middle_ends_alike(tmp_path):
    whole = run_example("run_dpo.py", tmp_path, SHORT_DPO)
    metrics = whole.metrics()
    assert metrics[0]["validation/accuracy"] == 0
    assert metrics[12]["validation/accuracy"] > 0.55
    assert metrics[12]["train/rewards_margin_mean"] > 0 == metrics[1]["train/rewards_margin_mean"]

    shutil.rmtree(tmp_path / "checkpoints" / "step_12")
    log = whole.folder / "logs" / "exp_001" / "metrics.jsonl"
    log.write_text("".join(f"{line}\n" for line in log.read_text().splitlines() if json.loads(line)["step"] <= 6))
    run_example("run_dpo.py", tmp_path, SHORT_DPO)
    assert whole.metrics() == metrics


SHORT = ["sft.max_num_steps=1", "policy.train_global_batch_size=32", "policy.train_micro_batch_size=16"]


@pytest.fixture
def known_as_wrong(tmp_path, monkeypatch):
    """Stores a failed check of the recipe's model; no supported family fails one any more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, _ = for_machine(load(ROOT / "examples" / "configs" / "sft_tiny_cpu.yaml").config, has_gpus=False)
    policy = config["policy"]
    key = cache.key_of(alone(policy, twin_config(hf_config(policy)).to_dict()), device="cpu")
    cache.write(key, CheckResult((Difference("padded", 0.25, 0.5, "model.norm.weight"),), "cpu", "local", {}))


def test_a_wrong_model_ends_the_run_in_one_sentence(tmp_path, known_as_wrong):
    done = run_example("run_sft.py", tmp_path, SHORT, status=1)
    assert "model differ from transformers': log-probs of a small twin differ by 0.25" in done.output
    assert "policy.skip_model_check" in done.output.strip().splitlines()[-1]
    assert "Traceback" not in done.output
