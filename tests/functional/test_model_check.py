"""Tests what a user sees if Megatron computes a model differently from transformers."""

import pytest
from support.examples import ROOT, run_example

from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.model_check import cache
from nemo_offload_rl.model_check.alone import alone
from nemo_offload_rl.model_check.result import CheckResult, Difference
from nemo_offload_rl.model_check.twin import twin_config

pytestmark = pytest.mark.slow

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
    done = run_example("run_sft.py", tmp_path, SHORT)
    assert done.status == 1
    assert "model differ from transformers': log-probs of a small twin differ by 0.25" in done.output
    assert "policy.skip_model_check" in done.output.strip().splitlines()[-1]
    assert "Traceback" not in done.output
