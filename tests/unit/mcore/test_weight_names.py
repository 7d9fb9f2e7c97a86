"""Tests that a folder without all weights is refused: Megatron-Bridge alone keeps uninitialised memory instead."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, logprobs_in_transformers, random_batch, tiny_policy

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
    with pytest.raises(ValueError, match=rf"^policy\.model_name '{tmp_path}' lacks 1 weights .*such as '{weight}'"):
        make_worker(policy)


def test_a_weight_without_a_name_is_said(make_worker):
    """In Qwen3's files, the biases by which routers choose have no names."""
    policy = tiny_policy(
        TINY_QWEN3_MOE, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", moe_router_dtype="fp32"
    )
    with pytest.raises(ValueError, match=r"has no names for 4 weights .*layers\.0\.mlp\.router\.expert_bias'"):
        make_worker(policy)


def changed(folder, **weights):
    file = folder / "model.safetensors"
    save_file(load_file(file) | weights, file, metadata={"format": "pt"})


def test_an_output_layer_of_its_own_is_refused_in_a_model_that_ties_it(make_worker, tmp_path):
    """transformers does not tie such a model, and Megatron would."""
    policy = folder_without(None, TINY_QWEN3, tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    changed(tmp_path, **{"lm_head.weight": embedding.clone()})
    before = make_worker(policy).get_logprobs(random_batch(2), mbs=2)["logprobs"]
    changed(tmp_path, **{"lm_head.weight": 2 * embedding})
    with pytest.raises(ValueError, match=r"has different weights 'lm_head\.weight' and 'model\.embed_tokens\.weight'"):
        make_worker(policy)
    untied = make_worker(policy | {"hf_config_overrides": {"tie_word_embeddings": False}})
    data = random_batch(2)
    found = untied.get_logprobs(data, mbs=2)["logprobs"]
    wanted = logprobs_in_transformers(tmp_path, data)
    length = int(data["input_lengths"][0])
    torch.testing.assert_close(found[0, 1:length], wanted[0, : length - 1], rtol=0, atol=1e-4)
    assert (found - before).abs().max() > 1e-3


@pytest.mark.parametrize("config", [TINY_QWEN3, UNTIED])
def test_an_embedding_with_other_rows_than_the_vocabulary_is_refused(make_worker, tmp_path, config):
    policy = folder_without(None, config, tmp_path)
    with pytest.raises(ValueError, match=r"has 14 rows in 'model\.embed_tokens\.weight', but .* vocab_size 12;"):
        make_worker(policy | {"hf_config_overrides": {"vocab_size": 12}})
    make_worker(policy)


def test_weights_that_no_parameter_takes_are_named(make_worker, tmp_path, caplog):
    policy = folder_without(None, TINY_QWEN3_MOE, tmp_path)
    caplog.set_level(logging.WARNING)  # whatever level earlier tests have left
    make_worker(policy)
    assert not caplog.records
    changed(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    make_worker(policy)
    assert not caplog.records  # transformers computes it, and ignores it in files
    changed(tmp_path, **{"value_head.weight": torch.ones(1, 64)})
    make_worker(policy | {"hf_config_overrides": {"num_hidden_layers": 3}})
    (record,) = caplog.records
    left_out = 2 + 6 + 1 + 3 * 4  # of a layer: norms, weights of attention, router, experts
    assert f"has {left_out + 1} weights that a model of its config (model_type qwen3_moe) does not" in record.message
    assert "'model.layers.3.input_layernorm.weight'" in record.message
