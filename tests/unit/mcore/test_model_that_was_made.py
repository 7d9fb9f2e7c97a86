"""Tests checks on Megatron's config that need the model or the machine, which a recipe alone does not describe."""

import pytest
import torch
from support.tiny import TINY_DEEPSEEK_V3, TINY_QWEN3, TINY_QWEN3_MOE, offloading_activations, tiny_policy

from nemo_offload_rl.mcore.model import model_config

MEGATRON = r"policy\.megatron_cfg"
DENSE, EXPERTS = TINY_QWEN3, TINY_QWEN3_MOE


def provider_of(policy):
    return model_config.make_provider(policy, model_config.make_bridge(policy, model_config.hf_config(policy)))


def capturing(hf_config, *modules, **megatron):
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": list(modules)}
    return tiny_policy(hf_config, "bfloat16", **graphs, **megatron)


def offloading(hf_config, *modules):
    return offloading_activations(tiny_policy(hf_config), list(modules))


def test_modules_of_experts_are_refused_in_a_dense_model():
    message = rf"{MEGATRON}\.offload_modules: names 'moe_act', which only a mixture-of-experts model has, but the pol"
    with pytest.raises(ValueError, match=message):
        provider_of(offloading(DENSE, "core_attn", "moe_act"))
    assert provider_of(offloading(EXPERTS, "core_attn", "moe_act")).offload_modules == ["core_attn", "moe_act"]


def test_latent_attention_needs_transformer_engine(monkeypatch):
    monkeypatch.setattr(model_config, "have_transformer_engine", lambda: False)
    with pytest.raises(ValueError, match=r"has multi-latent attention .*, which needs Transformer Engine; run"):
        provider_of(tiny_policy(TINY_DEEPSEEK_V3))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (capturing(DENSE, "moe_router"), "names 'moe_router', which only mixture-of-experts layers have"),
        (capturing(EXPERTS, "mlp"), "names 'mlp', which is captured in dense layers, and every layer of"),
        (capturing(EXPERTS, "mlp", moe_layer_freq=1), "names 'mlp', which is captured in dense layers"),
    ],
    ids=["moe_router", "mlp", "mlp and experts everywhere"],
)
def test_graphs_of_layers_that_the_model_lacks_are_refused(policy, message):
    with pytest.raises(ValueError, match=rf"{MEGATRON}\.cuda_graph_modules: {message}"):
        provider_of(policy)


@pytest.mark.parametrize(
    "policy",
    [
        capturing(EXPERTS, "moe_router"),
        capturing(DENSE, "mlp"),
        capturing(EXPERTS | {"mlp_only_layers": [0]}, "mlp", "moe_router", moe_layer_freq=[0, 1, 1, 1]),
        capturing(EXPERTS | {"mlp_only_layers": [0]}, "mlp", "moe_router"),
    ],
    ids=["moe_router", "mlp", "both", "both by the model"],
)
def test_graphs_of_layers_that_the_model_has_are_accepted(policy):
    provider = provider_of(policy)
    assert [module.name for module in provider.cuda_graph_modules] == policy["megatron_cfg"]["cuda_graph_modules"]


def test_what_is_off_is_not_asked_for():
    policy = tiny_policy(DENSE, cuda_graph_modules=["moe_router"], offload_modules=["moe_act"])
    assert provider_of(policy).num_moe_experts is None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            offloading(DENSE, "core_attn"),
            rf"{MEGATRON}\.fine_grained_activation_offloading is true, which needs Transformer Engine, but that is not "
            r"installed on this GPU machine; install it \(extra te\), or set fine_grained_activation_offloading "
            r"to false",
        ),
        (
            capturing(EXPERTS, "moe_router"),
            rf"{MEGATRON}\.cuda_graph_impl is transformer_engine, which needs Transformer Engine, .* to none",
        ),
    ],
    ids=["offloading", "graphs"],
)
def test_a_gpu_without_transformer_engine_is_refused_what_needs_it(policy, message, monkeypatch):
    bridge = model_config.make_bridge(policy, model_config.hf_config(policy))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model_config, "have_transformer_engine", lambda: False)
    with pytest.raises(ValueError, match=message):
        model_config.make_provider(policy, bridge)
