"""Sizes of a model that do not fit each other, and models that nothing can build."""

import json

import pytest

from nemo_offload_rl.config import load
from nemo_offload_rl.config.installed.bridges import bridged_architectures
from nemo_offload_rl.config.installed.transformers_source import causal_models
from nemo_offload_rl.config.model.unsupported_models import check_model
from nemo_offload_rl.config.rules import RULES, model
from tests.unit.config.conftest import CONFIGS, each_of

HF = "policy.hf_config"
ALONE = "~warm_start"
MOE = [ALONE, f"{HF}.model_type=qwen3_moe", f"+{HF}.num_experts=4", f"+{HF}.num_experts_per_tok=2"]
DEEPSEEK = [
    *(ALONE, f"{HF}.model_type=deepseek_v3", f"{HF}.num_key_value_heads=4", f"+{HF}.n_routed_experts=8"),
    *(f"+{HF}.topk_group=1", f"+{HF}.n_group=1"),
]
# Without head_dim, on which the hidden size is split then.
NO_HEAD_DIM = [ALONE, f"~{HF}.head_dim", f"{HF}.hidden_size=30"]

BROKEN = {
    "folders_have_sizes": [],  # has a test of its own
    "key_value_heads_divide_heads": [
        (
            [f"{HF}.num_key_value_heads=3"],
            f"{HF}.num_key_value_heads: num_key_value_heads (3) must divide num_attention_",
        ),
        (
            [f"~{HF}.num_key_value_heads"],
            "num_key_value_heads (32, qwen3's default) must divide num_attention_heads (4)",
        ),
        (
            ["+policy.hf_config_overrides={num_attention_heads: 3}"],
            f"{HF}.num_key_value_heads: num_key_value_heads (2) must divide num_attention_heads (3)",
        ),
    ],
    "heads_divide_hidden_size": [
        (
            [*NO_HEAD_DIM, f"{HF}.model_type=llama"],
            f"{HF}.num_attention_heads: num_attention_heads (4) must divide hidden_size (30); change one of them, or",
        ),
        ([*NO_HEAD_DIM, f"{HF}.model_type=qwen2"], "num_attention_heads (4) must divide hidden_size (30); change one"),
    ],
    "rotated_heads_are_even": [([f"{HF}.head_dim=31"], f"{HF}.head_dim: head_dim (31) must be even, since")],
    "tokens_go_to_experts_that_are_there": [
        (
            [*MOE, f"{HF}.num_experts_per_tok=5"],
            f"{HF}.num_experts_per_tok: num_experts_per_tok (5) must be at most num_experts (4)",
        ),
        (
            [*MOE, f"~{HF}.num_experts_per_tok"],
            "num_experts_per_tok (8, qwen3_moe's default) must be at most num_experts",
        ),
    ],
    "groups_of_experts_are_equal": [
        ([*DEEPSEEK, f"{HF}.n_group=3"], f"{HF}.n_group: n_group (3) must divide n_routed_experts (8)"),
        (
            [*DEEPSEEK, f"{HF}.n_group=2", f"{HF}.topk_group=3"],
            f"{HF}.topk_group: topk_group (3) must be at most n_group",
        ),
    ],
    "layers_are_counted_from_0": [
        ([f"+{HF}.layer_types=[full_attention]"], f"{HF}.layer_types: layer_types must have one entry for each of 4"),
        ([*MOE, f"+{HF}.mlp_only_layers=[4]"], f"{HF}.mlp_only_layers: mlp_only_layers must hold layers from 0 to 3"),
        (
            [*DEEPSEEK, f"+{HF}.first_k_dense_replace=5"],
            f"{HF}.first_k_dense_replace: first_k_dense_replace (5) must be at most num_hidden_layers (4)",
        ),
    ],
    "special_tokens_are_in_the_vocabulary": [
        ([f"+{HF}.eos_token_id=14"], f"{HF}.eos_token_id: eos_token_id 14 is outside the vocabulary, 0 to 13"),
        ([f"+{HF}.eos_token_id=[1,20]"], "eos_token_id 20 is outside the vocabulary"),
    ],
    "stop_tokens_are_in_the_vocabulary": [
        (
            ["policy.generation.stop_token_ids=[12,14]"],
            "policy.generation.stop_token_ids: has 14, which is outside the model's vocabulary (0 to 13)",
        ),
    ],
    "model_has_a_bridge": [
        (
            [ALONE, f"{HF}.model_type=mixtral"],
            f"{HF}.model_type: the model is 'MixtralForCausalLM', which the installed Megatron-Bridge cannot build; ",
        ),
        (
            [f"+{HF}.architectures=[Qwen3ForCausalLn]"],
            f"{HF}.architectures: the model is 'Qwen3ForCausalLn', which the installed Megatron-Bridge cannot build; "
            "did you mean Qwen3ForCausalLM?",
        ),
    ],
}


@each_of(BROKEN)
def test_a_broken_rule_is_one_problem_with_its_key_and_remedy(overrides, message, one_problem_of):
    overrides = overrides if ALONE in overrides else [ALONE, *overrides]
    assert message in one_problem_of(*overrides)


def test_every_rule_has_a_recipe_that_breaks_it():
    assert set(BROKEN) == {rule.check.__name__ for rule in RULES if rule.check.__module__ == model.__name__}


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("num_hidden_layers", "x"),
        ("head_dim", -1),
        ("vocab_size", None),
        ("hidden_size", 64.5),
        ("num_key_value_heads", 0),
    ],
)
def test_a_folders_sizes_are_checked_and_its_other_fields_are_not(field, found, tmp_path, one_problem_of):
    fields = {"model_type": "qwen3", "quantisation_of_a_hub": [1], "pad_token_id": -1, "num_key_value_heads": 8}
    folder = [ALONE, f"policy.model_name={tmp_path}", "policy.hf_config=null", "policy.tokenizer.name=x"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    load(CONFIGS / "grpo_tiny_cpu.yaml", folder)
    (tmp_path / "config.json").write_text(json.dumps(fields | {field: found}))
    error = one_problem_of(*folder)
    assert f"policy.model_name: the config.json in '{tmp_path}' has {field} " in error
    assert f"give policy.hf_config_overrides.{field}" in error
    load(CONFIGS / "grpo_tiny_cpu.yaml", [*folder, f"+policy.hf_config_overrides={{{field}: 8}}"])


def test_bridges_are_those_of_the_imported_library():
    """Of the architectures that transformers has; the library has some under two names."""
    from nemo_offload_rl.mcore.model.bridge_import import auto_bridge

    of_transformers = set(causal_models().values())
    assert bridged_architectures() & of_transformers == set(auto_bridge().list_supported_models()) & of_transformers


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_bias_that_vllm_does_not_have_is_refused(family):
    fields = {"model_type": family, "attention_bias": True}
    policy = {"megatron_cfg": {"use_fused_linear_logprobs": False}, "logprob_chunk_size": None}
    with pytest.raises(ValueError, match=rf"backend is vllm, whose {family} models have no bias .* set the backend to"):
        check_model(fields, policy | {"generation": {"backend": "vllm"}})
    for section in ({"generation": {"backend": "transformers"}}, {}):  # SFT has none
        check_model(fields, policy | section)
    check_model(fields | {"attention_bias": False}, policy | {"generation": {"backend": "vllm"}})
    check_model(fields | {"model_type": "llama"}, policy | {"generation": {"backend": "vllm"}})
