"""Modules that are offloaded, captured or recomputed: the kinds of models, and what Megatron itself refuses."""

import json

import pytest
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import CudaGraphModule

from nemo_offload_rl.config import load, megatron
from nemo_offload_rl.config.model.families import has_experts
from tests.unit.config.conftest import CONFIGS, MEGATRON


def test_another_megatron_core_is_refused(installed, error_of):
    installed(megatron_core="0.20.0")
    error_of(f"{MEGATRON}.fine_grained_activation_offloading=true", f"{MEGATRON}.offload_modules=[core_attn]")
    load(CONFIGS / "grpo_tiny_cpu.yaml")


KINDS = [
    ({"model_type": "qwen3"}, None, False),
    ({"model_type": "some_other"}, None, None),
    ({"model_type": "mixtral", "num_local_experts": 8}, None, True),
    ({"model_type": "mixtral"}, None, None),
    ({"model_type": "qwen3_moe", "num_experts": 1}, None, False),
    ({"model_type": "deepseek_v3", "n_routed_experts": 256}, None, True),
    ({"model_type": "deepseek_v3", "n_routed_experts": 256}, [0, 1, 1], True),
    ({"model_type": "deepseek_v3", "n_routed_experts": 256}, [1, 1, 1], True),
    ({"model_type": "deepseek_v3", "n_routed_experts": 256}, [0, 0, 0], False),
    ({"model_type": "qwen3_moe", "num_experts": 8}, 2, True),
    ({"model_type": "qwen3_moe", "num_experts": 8}, 1, True),
]


@pytest.mark.parametrize(("fields", "freq", "wanted"), KINDS)
def test_whether_a_model_has_experts_is_read_from_its_config(tmp_path, fields, freq, wanted):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert has_experts("a-label", fields, None, freq) is has_experts(str(tmp_path), None, None, freq) is wanted


def test_a_config_is_read_with_its_overrides_or_tells_nothing(tmp_path):
    assert has_experts("a-label", {"model_type": "qwen3_moe"}, {"num_experts": 4}, None) is True
    for unreadable in ("", "{", "[]"):
        (tmp_path / "config.json").write_text(unreadable)
        assert has_experts(str(tmp_path), None, None, None) is None


def transformer_config(**fields):
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 1, "bf16": True}
    offloads = {"fine_grained_activation_offloading": True} if "offload_modules" in fields else {}
    return TransformerConfig(**sizes | offloads | fields)


def test_modules_are_those_of_megatron():
    megatrons = [name for name in megatron.ACTIVATION_MODULES if name != megatron.LAYER_INPUT]
    for name in megatrons:
        names = ["core_attn", name] if name == "attn_proj" else [name]
        transformer_config(offload_modules=names, use_transformer_engine_op_fuser=name == "fused_group_mlp")
    with pytest.raises(AssertionError) as caught:
        transformer_config(offload_modules=["core_atn"])
    assert all(f"'{name}'" in str(caught.value) for name in megatrons)
    assert str(caught.value).partition("Allowed")[2].count("'") == 2 * len(megatrons)
    assert {module.name for module in CudaGraphModule} == {*megatron.GRAPH_MODULES, "moe", "mamba"}


GRAPH = {"cuda_graph_impl": "transformer_engine", "use_te_rng_tracker": True}
MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "add_bias_linear": False}
MOE |= {"moe_token_dispatcher_type": "alltoall"}


WITHOUT_A_RULE = [
    ({"offload_modules": ["fused_group_mlp"]}, "fused_group_mlp requires use_transformer_engine_op_fuser"),
    (
        {"offload_modules": ["fused_group_mlp", "moe_act"], "use_transformer_engine_op_fuser": True},
        "cannot be combined with expert_fc1 or moe_act",
    ),
    (MOE | GRAPH | {"cuda_graph_modules": ["moe_preprocess"]}, "moe_preprocess cuda graph is only supported with"),
    (GRAPH | {"cuda_graph_modules": ["moe_router"]}, "moe cuda graph is only supported for MoE"),
    (MOE | GRAPH | {"cuda_graph_modules": ["mlp"]}, "mlp cuda graph is only supported for dense layers"),
    (
        MOE | GRAPH
        | {"cuda_graph_modules": ["moe_router", "moe_preprocess"], "moe_expert_capacity_factor": 1.5},
        "not supported when there are DtoH copies",
    ),
    (
        MOE | {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
        "moe_act in recompute_modules is only supported with moe_grouped_gemm",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), WITHOUT_A_RULE)
def test_what_has_no_rule_is_refused_by_megatrons_config(fields, message):
    """Each combination once had a rule here; megatron-core says the same when a worker, or `validate --deep`, asks."""
    with pytest.raises((AssertionError, ValueError), match=message):
        transformer_config(**fields)
