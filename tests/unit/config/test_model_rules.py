"""Models that nothing can build, and those that Megatron would compute otherwise than transformers does."""

import json

import pytest

from nemo_offload_rl.config.installed.declared_fields import bridged_architectures
from nemo_offload_rl.config.installed.transformers_source import causal_models
from nemo_offload_rl.config.model.families import check_model

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
    with pytest.raises(ValueError, match=rf"backend is vllm, whose {family} models have no bias .* set the backend to"):
        check_model(fields, policy | {"generation": {"backend": "vllm"}})
    for section in ({"generation": {"backend": "transformers"}}, {}):  # SFT has none
        check_model(fields, policy | section)
    check_model(fields | {"attention_bias": False}, policy | {"generation": {"backend": "vllm"}})
    check_model(fields | {"model_type": "llama"}, policy | {"generation": {"backend": "vllm"}})
