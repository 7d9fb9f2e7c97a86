"""Tests that a folder without all weights is refused: Megatron-Bridge alone keeps uninitialised memory instead."""

import pytest
from safetensors.torch import load_file, save_file
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, tiny_policy

from nemo_offload_rl.hf_config import hf_config

UNTIED = TINY_QWEN3 | {"tie_word_embeddings": False}


def folder_without(weight, config, folder):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(hf_config(tiny_policy(config))).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    if weight is not None:
        del weights[weight]
    save_file(weights, file, metadata={"format": "pt"})
    return tiny_policy() | {"hf_config": None, "model_name": str(folder)}


@pytest.mark.parametrize(
    ("config", "weight"),
    [
        (TINY_QWEN3, "model.layers.1.self_attn.q_proj.weight"),
        (TINY_QWEN3, "model.layers.3.self_attn.q_norm.weight"),
        (TINY_QWEN3_MOE, "model.layers.1.mlp.experts.2.up_proj.weight"),
        (UNTIED, "lm_head.weight"),
    ],
)
def test_a_missing_weight_is_named(make_worker, tmp_path, config, weight):
    policy = folder_without(weight, config, tmp_path)
    with pytest.raises(
        ValueError, match=rf"^policy\.model_name '{tmp_path}' lacks 1 weights .*such as '{weight}'; use"
    ):
        make_worker(policy)


@pytest.mark.parametrize("config", [TINY_QWEN3, UNTIED, TINY_QWEN3_MOE], ids=["tied", "untied", "experts"])
def test_whole_folders_are_loaded(make_worker, tmp_path, config):
    make_worker(folder_without(None, config, tmp_path))


def test_a_weight_without_a_name_is_said(make_worker):
    """In Qwen3's files, the biases by which routers choose have no names."""
    policy = tiny_policy(
        TINY_QWEN3_MOE, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", moe_router_dtype="fp32"
    )
    with pytest.raises(
        ValueError, match=r"has no names for 4 weights .*'decoder\.layers\.0\.mlp\.router\.expert_bias'"
    ):
        make_worker(policy)
