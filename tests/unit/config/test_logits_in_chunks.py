"""Keys of logits in chunks: what loads, what they stand for, and what is refused."""

import pytest

from nemo_offload_rl.config import load
from nemo_offload_rl.config.model.families import check_model
from tests.unit.config.conftest import CONFIGS

FUSED = "policy.megatron_cfg.use_fused_linear_logprobs"


def test_keys_of_chunks_are_taken_as_they_are_written():
    overrides = [f"++{FUSED}=true", "++policy.megatron_cfg.fused_linear_logprobs_chunk_size=128"]
    policy = load(CONFIGS / "grpo_tiny_cpu.yaml", [*overrides, "++policy.logprob_chunk_size=2048"]).config["policy"]
    assert policy["logprob_chunk_size"] == 2048
    assert policy["megatron_cfg"]["use_fused_linear_logprobs"] is True
    assert policy["megatron_cfg"]["fused_linear_logprobs_chunk_size"] == 128


@pytest.mark.parametrize("override", ["policy.logprob_chunk_size=0", f"{FUSED}=1"])
def test_values_of_another_kind_are_refused(error_of, override):
    assert override.partition("=")[0] in error_of(f"++{override}")


def test_dpo_computes_log_probs_apart_from_training():
    assert load(CONFIGS / "dpo_tiny_cpu.yaml", ["++policy.logprob_chunk_size=64"])


def test_a_model_that_caps_its_logits_is_refused():
    policy = load(CONFIGS / "grpo_tiny_cpu.yaml", [f"++{FUSED}=true"]).config["policy"]
    check_model({"model_type": "qwen3"}, policy)
    check_model({"model_type": "gemma4_text", "final_logit_softcapping": None}, policy)
    capped = {"model_type": "gemma4_text", "final_logit_softcapping": 30.0}
    with pytest.raises(ValueError, match=rf"{FUSED} true .*\(final_logit_softcapping 30.0\).* to false"):
        check_model(capped, policy)
    check_model(capped, load(CONFIGS / "grpo_tiny_cpu.yaml", [f"++{FUSED}=false"]).config["policy"])
