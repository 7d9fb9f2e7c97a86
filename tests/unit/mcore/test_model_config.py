import contextlib
import copy
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from megatron.core.transformer.enums import AttnBackend
from support.tiny import TINY_DEEPSEEK_V3, TINY_QWEN3, TINY_QWEN3_MOE, offloading_activations, tiny_policy

from nemo_offload_rl.mcore.model import model_config

MODELS = {"dense": TINY_QWEN3, "experts": TINY_QWEN3_MOE}
CASES = yaml.safe_load((Path(__file__).parent / "data" / "providers.yaml").read_text())


def bridge_of(policy):
    return model_config.make_bridge(policy, model_config.hf_config(policy))


def provider_of(policy):
    return model_config.make_provider(policy, bridge_of(policy))


def overrides_of(*, packed=False, **megatron):
    policy = tiny_policy(**megatron) | {"sequence_packing": {"enabled": packed}}
    return model_config.model_overrides(policy, bridge_of(policy).to_megatron_provider(load_weights=False))


def policy_of(*, model="dense", fields=None, megatron=None, packed=False, offloads=None, **_):
    """Returns the policy of a case."""
    precision = "bfloat16" if megatron and "cuda_graph_impl" in megatron else "float32"
    policy = tiny_policy(MODELS[model] | (fields or {}), precision, **(megatron or {}))
    policy["sequence_packing"] = {"enabled": packed}
    return policy if offloads is None else offloading_activations(policy, offloads)


@pytest.mark.parametrize("name", CASES)
def test_a_policy_gives_megatrons_config_or_is_refused_by_its_keys(name):
    case = CASES[name]
    with pytest.raises(ValueError, match=case["refused"]) if "refused" in case else contextlib.nullcontext():
        provider = provider_of(policy_of(**case))
        assert {field: plain(getattr(provider, field)) for field in case["gives"]} == case["gives"]


def plain(value):
    """Returns a field's value with modules by their names."""
    return [getattr(item, "name", item) for item in value] if isinstance(value, list) else value


def test_any_field_of_the_transformer_config_reaches_the_model():
    provider = provider_of(tiny_policy(hidden_dropout=0.1, layernorm_epsilon=1e-3, rotary_interleaved=True))
    assert (provider.hidden_dropout, provider.layernorm_epsilon, provider.rotary_interleaved) == (0.1, 1e-3, True)
    assert provider.attention_dropout == 0.0  # the default of an absent key


def test_float32_has_no_bf16_optimizer():
    with pytest.raises(ValueError, match=r"policy\.precision is float32; set bf16 to false"):
        model_config.make_optimizer_config(tiny_policy(optimizer={"bf16": True}))


def test_recomputation_counts_only_with_activation_checkpointing():
    assert overrides_of(recompute_granularity="full")["recompute_granularity"] is None
    on = overrides_of(activation_checkpointing=True, recompute_granularity="full")
    assert (on["recompute_granularity"], on["recompute_method"], on["recompute_num_layers"]) == ("full", "uniform", 1)


def test_null_leaves_the_models_own_value_but_where_nemo_rl_sets_it():
    overrides = overrides_of(moe_router_dtype=None, moe_router_num_groups=None, moe_router_topk=None)
    assert overrides["moe_router_dtype"] is overrides["moe_router_num_groups"] is None  # deepseek_v3 has fp32 and 8
    assert not {"moe_router_group_topk", "moe_router_topk"} & overrides.keys()


def test_virtual_stages_run_as_many_micro_batches_at_a_time_as_there_are_stages_or_as_the_recipe_says():
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    for given, number in ({}, 2), ({"microbatch_group_size_per_vp_stage": 3}, 3):
        assert provider_of(tiny_policy(**layout, **given)).microbatch_group_size_per_vp_stage == number


@pytest.mark.parametrize("sizes", [{"expert_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("stated", [True, False], ids=["by the recipe", "by the bridge"])
def test_experts_gather_no_packed_rows_of_different_lengths(sizes, stated, monkeypatch):
    policy = tiny_policy(TINY_QWEN3_MOE, **sizes, moe_token_dispatcher_type="allgather" if stated else None)
    bridge = bridge_of(policy)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.moe_token_dispatcher_type = "allgather"  # megatron-core's default
    monkeypatch.setattr(bridge, "to_megatron_provider", lambda **_: copy.deepcopy(provider))
    packed = policy | {"sequence_packing": {"enabled": True}}
    with pytest.raises(ValueError, match=r"moe_token_dispatcher_type is allgather, .* set it to alltoall"):
        model_config.make_provider(packed, bridge)
    assert model_config.make_provider(policy, bridge).moe_token_dispatcher_type == "allgather"
    packed["megatron_cfg"] |= dict.fromkeys(sizes, 1)
    assert model_config.make_provider(packed, bridge).moe_token_dispatcher_type == "allgather"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_embeddings_that_are_overridden_keep_their_base(key):
    hf_config = TINY_QWEN3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    policy = tiny_policy(hf_config) | {"hf_config_overrides": {key: yarn}}
    assert model_config.hf_config(policy).rope_parameters == yarn | {"rope_type": "yarn", "rope_theta": 5e5}
    policy["hf_config_overrides"] = {key: yarn | {"rope_theta": 1e4}}
    assert model_config.hf_config(policy).rope_parameters["rope_theta"] == 1e4
    policy["hf_config_overrides"] = {key: None}
    assert model_config.hf_config(policy).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_windows_that_are_switched_on_too_late_are_refused():
    policy = tiny_policy() | {"hf_config_overrides": {"use_sliding_window": True, "sliding_window": 8}}
    with pytest.raises(ValueError, match=r"use_sliding_window is true, but the model was read without windows, and no"):
        model_config.hf_config(policy)
    policy["hf_config_overrides"]["layer_types"] = ["sliding_attention"] * 4
    assert model_config.hf_config(policy).sliding_window == 8


NO_MODELS = [
    ({"hf_config": {"model_type": "qwen99"}}, r"policy\.hf_config\.model_type is 'qwen99', which"),
    ({"hf_config": {"hidden_size": 64}}, r"policy\.hf_config\.model_type is None, which"),
    ({"hf_config_overrides": {"num_layerz": 3}}, r"overrides\.num_layerz: Qwen3Config has no such field"),
    ({"hf_config": None, "model_name": "./no/such/folder"}, r"policy\.model_name is './no/such/folder'"),
]


@pytest.mark.parametrize(("keys", "words"), NO_MODELS)
def test_a_model_that_cannot_be_had_is_named(monkeypatch, keys, words):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=words):
        model_config.hf_config(tiny_policy() | keys)


@pytest.mark.parametrize("where", ["hf_config", "a folder"])
def test_overrides_reach_what_the_config_has_made_of_them(where, tmp_path):
    fields = tiny_policy()["hf_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    overrides = {"rope_theta": 1_000_000, "num_hidden_layers": 2, "rms_norm_eps": 1}
    policy = {"model_name": str(tmp_path), "hf_config": fields if where == "hf_config" else None}
    config = model_config.hf_config(policy | {"hf_config_overrides": overrides})
    assert config.rope_parameters["rope_theta"] == 1e6
    assert config.layer_types == ["full_attention"] * 2
    assert config.rms_norm_eps == 1.0
    config.validate()
    with pytest.raises(ValueError, match="num_hidden_layers is 9, but the config says of 4 layers"):
        model_config.hf_config(policy | {"hf_config_overrides": {"num_hidden_layers": 9}})


def test_the_recipe_is_left_as_it_is():
    """transformers writes into the mappings that it receives."""
    fields = tiny_policy()["hf_config"] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    before = copy.deepcopy(fields)
    model_config.hf_config({"model_name": "x", "hf_config": fields})
    assert fields == before


def nvte_variables():
    return {name: value for name, value in os.environ.items() if "NVTE" in name}


def test_the_next_model_of_a_process_may_have_another_attention_backend(make_worker, monkeypatch):
    """megatron-core sets the backend in the environment, and refuses a model of another one."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")  # the user's own
    before = nvte_variables()
    for name, variables in (("unfused", "001"), ("auto", "111")):
        worker = make_worker(tiny_policy(attention_backend=name))
        assert worker.state.config.attention_backend is AttnBackend[name]
        assert "".join(os.environ[f"NVTE_{kind}_ATTN"] for kind in ("FLASH", "FUSED", "UNFUSED")) == variables
    worker.shutdown()
    assert nvte_variables() == before


def test_latent_attention_needs_transformer_engine(monkeypatch):
    monkeypatch.setattr(model_config, "have_transformer_engine", lambda: False)
    with pytest.raises(ValueError, match=r"has multi-latent attention .*, which needs Transformer Engine; run"):
        provider_of(tiny_policy(TINY_DEEPSEEK_V3))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modules of experts are offloaded", r"fine_grained_activation_offloading is true, .* to false"),
        ("a router is captured", r"cuda_graph_impl is transformer_engine, .* to none"),
    ],
)
def test_a_gpu_without_transformer_engine_is_refused_what_needs_it(name, message, monkeypatch):
    policy = policy_of(**CASES[name])
    bridge = bridge_of(policy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model_config, "have_transformer_engine", lambda: False)
    with pytest.raises(ValueError, match=rf"policy\.megatron_cfg\.{message}"):
        model_config.make_provider(policy, bridge)
