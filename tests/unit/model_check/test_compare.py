"""Tests small twins of families and flags: Megatron computes what transformers does, and faults are found."""

import copy
import os
from typing import Any

import pytest
import torch
from support.tiny import tiny_policy

from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.mcore.patches import cpu_device
from nemo_offload_rl.model_check.alone import alone
from nemo_offload_rl.model_check.compare import compare, compare_configs, reference_of, rows, twin_config

SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 6}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}


@pytest.fixture(autouse=True)
def one_thread():
    cpu_device.install()
    torch.set_num_threads(1)


def policy_of(model_type: str, **fields: Any) -> dict[str, Any]:
    return tiny_policy({"model_type": model_type} | SIZES | fields)


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
RIGHT = {
    "llama": policy_of("llama"), "llama, tied": policy_of("llama", tie_word_embeddings=True),
    "llama, linear rope": policy_of("llama", rope_parameters=LINEAR),
    "mistral": policy_of("mistral", sliding_window=None), "qwen2": policy_of("qwen2"),
    "qwen2, tied": policy_of("qwen2", tie_word_embeddings=True), "qwen3": policy_of("qwen3"),
    "qwen3, tied": policy_of("qwen3", tie_word_embeddings=True),
    "gemma4_text": policy_of("gemma4_text", vocab_size_per_layer_input=30, final_logit_softcapping=30.0),
    "qwen3_moe": policy_of("qwen3_moe", norm_topk_prob=True, **EXPERTS),
    "qwen3_moe, weights of experts not normalized": policy_of("qwen3_moe", norm_topk_prob=False, **EXPERTS),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_megatron_computes_the_model_as_transformers_does(name):
    for difference in compare(RIGHT[name]):
        assert difference.logprob < 2e-5, difference
        assert difference.gradient < 2e-5, difference


FLAGS = [
    ("llama", "rms_norm_eps", 1e-2),
    ("llama", "hidden_act", "gelu"),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 1.1e4}),
    ("llama", "rope_parameters", LINEAR),
    ("qwen3_moe", "norm_topk_prob", False),
    ("qwen3_moe", "num_experts_per_tok", 3),
]


@pytest.mark.parametrize(("family", "field", "value"), FLAGS)
def test_a_flag_that_megatron_does_not_follow_is_seen(family, field, value):
    policy = policy_of(family, norm_topk_prob=True, **EXPERTS) if family == "qwen3_moe" else policy_of(family)
    twin = twin_config(hf_config(policy))
    planted = copy.deepcopy(twin)
    setattr(planted, field, value)
    differences = compare_configs(alone(policy, twin.to_dict()), reference=twin, built=planted)
    assert [difference.batches for difference in differences] == ["padded", "packed"]
    for difference in differences:
        assert difference.logprob > 1e-3
        assert difference.gradient > 1e-2
        assert not difference.is_rounding


NOT_COMPARED = [
    ("mixtral", "Megatron cannot compute this model: The model's architecture MixtralForCausalLM (model_type mix"),
    ("falcon_h1", "Megatron cannot compute this model: The model has custom layers"),  # before 25 GB are allocated
    ("glm_moe_dsa", "Megatron cannot compute this model: Megatron-Bridge cannot translate"),
    ("mamba", "The model check cannot make a small model of this mamba config (KeyError: 'num_attention_heads')"),
]


@pytest.mark.parametrize(("family", "message"), NOT_COMPARED)
def test_a_family_that_cannot_be_compared_is_one_sentence(family, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the message is compared below)
        compare(tiny_policy({"model_type": family}))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 350


def test_routers_that_choose_by_an_expert_bias_are_compared():
    """Without Transformer Engine there is one family of them that is built, and Megatron computes it differently."""
    differences = compare(tiny_policy({"model_type": "ernie4_5_moe"}))
    assert [difference.batches for difference in differences] == ["padded", "packed"]


def test_nothing_is_left_of_a_comparison():
    before = dict(os.environ)
    compare(RIGHT["llama"])
    assert not torch.distributed.is_initialized()
    assert dict(os.environ) == before


def test_tied_weights_have_one_gradient():
    config = twin_config(hf_config(RIGHT["llama, tied"]))
    gradients = reference_of(config, rows(config.vocab_size, seed=0), seed=0).gradients
    assert "model.embed_tokens.weight" in gradients
    assert "lm_head.weight" not in gradients  # absent for families whose bridge exports it once
