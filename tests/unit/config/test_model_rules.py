"""Models that nothing can build, and those that Megatron would compute otherwise than transformers does."""

import json

import pytest
from support.tiny import tiny_policy

from nemo_offload_rl.config.installed.declared_fields import bridged_architectures
from nemo_offload_rl.config.installed.transformers_source import causal_models
from nemo_offload_rl.config.model.families import check_model
from nemo_offload_rl.hf_config import hf_config

ALONE = "~warm_start"


def test_the_config_of_a_folder_is_read(tmp_path, error_of):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    error_of(ALONE, f"policy.model_name={tmp_path}", "policy.hf_config=null", "policy.tokenizer.name=x")


def test_a_model_that_only_the_worker_knows_is_frozen_in_part_only_if_it_has_no_such_part():
    megatron_cfg = {"freeze_config": {"freeze_vision_model": True}, "use_fused_linear_logprobs": False}
    policy = {"megatron_cfg": megatron_cfg, "logprob_chunk_size": None}
    check_model({"model_type": "qwen3"}, policy)
    with pytest.raises(ValueError, match=r"policy\.megatron_cfg\.freeze_config is .* the model has a vision_config"):
        check_model({"model_type": "qwen3_vl", "vision_config": {"depth": 2}}, policy)
    frozen = policy | {"megatron_cfg": megatron_cfg | {"freeze_config": {}}}
    check_model({"model_type": "qwen3_vl", "vision_config": {}}, frozen)


def test_a_model_that_caps_its_logits_is_refused_with_logits_in_chunks():
    def policy(is_fused):
        return {"megatron_cfg": {"use_fused_linear_logprobs": is_fused}, "logprob_chunk_size": None}

    check_model({"model_type": "qwen3"}, policy(True))
    check_model({"model_type": "gemma4_text", "final_logit_softcapping": None}, policy(True))
    capped = {"model_type": "gemma4_text", "final_logit_softcapping": 30.0}
    with pytest.raises(ValueError, match=r"_linear_logprobs true .*\(final_logit_softcapping 30.0\).* to false"):
        check_model(capped, policy(True))
    check_model(capped, policy(False))


def test_bridges_are_those_of_the_imported_library():
    """Of the architectures that transformers has; the library has some under two names."""
    from nemo_offload_rl.mcore.model.bridge_import import auto_bridge

    of_transformers = set(causal_models().values())
    assert bridged_architectures() & of_transformers == set(auto_bridge().list_supported_models()) & of_transformers


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_bias_that_vllm_does_not_have_is_refused(family):
    fields = {"model_type": family, "attention_bias": True}
    policy = {"megatron_cfg": {"use_fused_linear_logprobs": False}, "logprob_chunk_size": None}
    vllm = {"generation": {"backend": "vllm", "vllm_cfg": {"max_model_len": 8, "env_vars": None}}}
    with pytest.raises(ValueError, match=rf"backend is vllm, whose {family} models have no bias .* set the backend to"):
        check_model(fields, policy | vllm)
    for section in ({"generation": {"backend": "transformers"}}, {}):  # SFT has none
        check_model(fields, policy | section)
    check_model(fields | {"attention_bias": False}, policy | vllm)
    check_model(fields | {"model_type": "llama"}, policy | vllm)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_some_layers_that_vllm_does_not_have_are_refused(family):
    policy = {"megatron_cfg": {"use_fused_linear_logprobs": False}, "logprob_chunk_size": None}
    vllm = {"generation": {"backend": "vllm", "vllm_cfg": {"max_model_len": 8, "env_vars": None}}}
    fields = {"model_type": family, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(ValueError, match=r"layer_types.* 1 of 2 "):
        check_model(fields, policy | vllm)
    check_model(fields, policy | {"generation": {"backend": "transformers"}})
    check_model(fields | {"layer_types": ["sliding_attention"] * 2}, policy | vllm)
    no_layers = fields | {"layer_types": ["full_attention"] * 2}  # as of use_sliding_window with a late first layer
    with pytest.raises(ValueError, match=r"layer_types.* 0 of 2 "):
        check_model(no_layers, policy | vllm)
    for window in (None, 8):
        check_model(no_layers | {"sliding_window": window}, policy | vllm)


@pytest.mark.parametrize("keys", [{"attention_factor": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.2}])
def test_an_attention_factor_that_vllm_does_not_read_is_refused(keys):
    policy = {"megatron_cfg": {"use_fused_linear_logprobs": False}, "logprob_chunk_size": None}
    vllm = {"generation": {"backend": "vllm", "vllm_cfg": {"max_model_len": 8, "env_vars": None}}}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    fields = hf_config(tiny_policy({"model_type": "llama", "rope_parameters": yarn})).to_dict()
    rope = fields["rope_parameters"] | keys
    own = fields | {"rope_parameters": rope}
    older = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    for refused in (own, fields | {"rope_parameters": older}):
        with pytest.raises(ValueError, match=".*".join(keys)):
            check_model(refused, policy | vllm)
    check_model(own, policy | {"generation": {"backend": "transformers"}})
    for same in ({}, {"attention_factor": 1.1386294361119891}):  # 0.1 ln 4 + 1, as some configs write it out
        check_model(fields | {"rope_parameters": fields["rope_parameters"] | same}, policy | vllm)


ROWS_OF_VLLM = [
    ({}, 4096),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 4096),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 16384),
]


@pytest.mark.parametrize(("rope", "longest"), ROWS_OF_VLLM)
def test_rows_are_no_longer_than_vllm_takes(rope, longest, monkeypatch):
    """What vLLM 0.25.1's `_get_and_verify_max_len` gives for these configs."""
    fields = {"model_type": "llama", "max_position_embeddings": 4096} | rope

    def policy(length, **more):
        section = {"backend": "vllm", "vllm_cfg": {"max_model_len": length, "env_vars": None} | more}
        return {"megatron_cfg": {"use_fused_linear_logprobs": False}, "logprob_chunk_size": None, "generation": section}

    check_model(fields, policy(longest))
    with pytest.raises(ValueError, match=rf"vllm_cfg\.max_model_len .* {longest} "):
        check_model(fields, policy(longest + 1))
    check_model(fields, policy(longest + 1, env_vars={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check_model(fields, policy(longest + 1))
