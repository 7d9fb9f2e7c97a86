"""Modules that are offloaded, captured or recomputed: what passes, and what Megatron itself refuses."""

import json

import pytest
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import CudaGraphModule

from nemo_offload_rl.config import load
from nemo_offload_rl.config.megatron import (
    ACTIVATION_MODULES,
    GRAPH_MODULES,
    LAYER_INPUT,
    check_graphs_fit_model,
    check_modules_fit_model,
)
from nemo_offload_rl.config.model.families import model_kind
from tests.unit.config.conftest import CONFIGS, MEGATRON

OFFLOADED, CAPTURED = f"{MEGATRON}.offload_modules", f"{MEGATRON}.cuda_graph_modules"
OFFLOADING = f"{MEGATRON}.fine_grained_activation_offloading"
# A model of experts; without the dense one that GRPO would start from.
EXPERTS = "~warm_start policy.hf_config.model_type=qwen3_moe +policy.hf_config.num_experts=8"
FUSER = f"+{MEGATRON}.use_transformer_engine_op_fuser=true"
FULL = f"{MEGATRON}.activation_checkpointing=true"
SELECTIVE = f"{FULL} {MEGATRON}.recompute_granularity=selective"
PACKED = "policy.sequence_packing.enabled=true"
LENGTH, DIVISOR = "policy.max_total_sequence_length", "policy.make_sequence_length_divisible_by"
PIPELINE = f"{MEGATRON}.pipeline_model_parallel_size=2 cluster.gpus_per_node=2"
ALONE = "~warm_start"  # whose micro-batch is for one rank
BF16 = f"policy.precision=bfloat16 {MEGATRON}.optimizer.bf16=true"
CAPACITY = f"+{MEGATRON}.moe_expert_capacity_factor=1.5"
TILES = f"{MEGATRON}.mlp_tile_tokens"


def offload(*names):
    return f"{OFFLOADING}=true {OFFLOADED}=[{','.join(names)}]"


def capture(*names, length=128):
    graphs = f"{MEGATRON}.cuda_graph_impl=transformer_engine {BF16}"
    return f"{graphs} {CAPTURED}=[{','.join(names)}] {LENGTH}={length}"


def recompute(*names):
    return f"{SELECTIVE} {MEGATRON}.recompute_modules=[{','.join(names)}]"


def test_another_megatron_core_is_refused(installed, error_of):
    installed(megatron_core="0.20.0")
    error_of(*offload("core_attn").split())
    load(CONFIGS / "grpo_tiny_cpu.yaml")


@pytest.mark.parametrize(
    "overrides",
    [
        f"{OFFLOADED}=null",
        "~policy.activation_offload",
        offload("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
        f"{EXPERTS} {offload('qkv_linear', 'expert_fc1', 'moe_act')}",
        f"{EXPERTS} {FUSER} {offload('fused_group_mlp', 'core_attn')}",
        f"{TILES}=64 {offload('attn_norm', 'qkv_linear', 'core_attn', 'attn_proj', 'mlp_norm')}",
        f"{TILES}=64 {recompute('layernorm')}",
        f"{TILES}=auto {FULL}",
        f"{TILES}=auto {capture('attn')}",
        # With recomputation that does not count, or that discards outputs while inputs move.
        f"{offload('core_attn')} {MEGATRON}.recompute_modules=[core_attn]",
        f"{offload('qkv_linear')} {SELECTIVE}",
        f"{offload('attn_norm', 'mlp_norm')} {recompute('layernorm', 'mlp')}",
        f"{EXPERTS} {offload('moe_act', 'expert_fc1')} {recompute('moe_act')}",
        f"{offload('core_attn')} {MEGATRON}.env_vars={{NVTE_CPU_OFFLOAD_V1:'1'}}",
        # megatron-core's defaults, where a recipe of NeMo-RL says nothing.
        f"{offload('core_attn')} ~{MEGATRON}.activation_offload_fraction ~{MEGATRON}.min_offloaded_tensor_size "
        f"~{MEGATRON}.delta_offload_bytes_across_pp_ranks ~{MEGATRON}.delay_offload_until_cuda_graph "
        f"~{MEGATRON}.fine_grained_offloading_max_inflight_offloads",
        # While graphs are off.
        f"{CAPTURED}=[attn] {LENGTH}=100",
        f"{offload('core_attn')} {CAPTURED}=[attn] {PIPELINE} {ALONE}",
        capture("attn", "mlp"),
        f"{EXPERTS} {capture('moe_router')} {PACKED}",
        capture("mlp", length=100),
        f"{capture('attn', length=120)} {DIVISOR}=64",  # padded to 128
        # Outside of the graphs.
        f"{EXPERTS} {capture('attn', 'moe_router')} {offload('moe_act', 'expert_fc1')} {PIPELINE}",
        f"{capture('mlp')} {offload('core_attn', 'attn_proj')} {PIPELINE} {ALONE}",
        f"{capture('attn')} {SELECTIVE}",
        f"{EXPERTS} {capture('moe_router')} {recompute('moe_act')}",
        f"{EXPERTS} {CAPACITY} {offload('moe_act')}",
        f"{EXPERTS} {CAPACITY} {capture('attn', 'moe_router')}",
    ],
)
def test_what_works_is_accepted(overrides):
    load(CONFIGS / "grpo_tiny_cpu.yaml", overrides.split())


@pytest.mark.parametrize(
    ("fields", "freq", "has_experts", "has_dense_mlps"),
    [
        ({"model_type": "qwen3"}, None, False, True),
        ({"model_type": "some_other"}, None, None, None),
        ({"model_type": "mixtral", "num_local_experts": 8}, None, True, False),
        ({"model_type": "mixtral"}, None, None, None),
        ({"model_type": "qwen3_moe", "num_experts": 1}, None, False, True),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, None, True, None),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, [0, 1, 1], True, True),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, [1, 1, 1], True, False),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, [0, 0, 0], False, True),
        ({"model_type": "qwen3_moe", "num_experts": 8}, 2, True, True),
        ({"model_type": "qwen3_moe", "num_experts": 8}, 1, True, False),
    ],
)
def test_the_kind_of_a_model_is_read_from_its_config(tmp_path, fields, freq, has_experts, has_dense_mlps):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for kind in (model_kind("a-label", fields, None, freq), model_kind(str(tmp_path), None, None, freq)):
        assert (kind.has_experts, kind.has_dense_mlps) == (has_experts, has_dense_mlps)


def test_a_config_is_read_with_its_overrides_or_tells_nothing(tmp_path):
    kind = model_kind("a-label", {"model_type": "qwen3_moe"}, {"num_experts": 4}, None)
    assert kind.has_experts is True
    for unreadable in ("", "{", "[]"):
        (tmp_path / "config.json").write_text(unreadable)
        assert model_kind(str(tmp_path), None, None, None).has_experts is None


def test_modules_are_checked_against_the_model_that_was_built():
    with pytest.raises(ValueError, match=r"policy\.megatron_cfg\.offload_modules: names 'moe_act', which only a mixt"):
        check_modules_fit_model(["core_attn", "moe_act"], is_moe=False)
    check_modules_fit_model(ACTIVATION_MODULES, is_moe=True)
    with pytest.raises(ValueError, match=r"policy\.megatron_cfg\.cuda_graph_modules: names 'moe_router', which only"):
        check_graphs_fit_model(["moe_router"], has_experts=False, has_dense_mlps=True)
    with pytest.raises(ValueError, match="names 'mlp', which is captured in dense layers"):
        check_graphs_fit_model(["attn", "mlp"], has_experts=True, has_dense_mlps=False)
    check_graphs_fit_model(["attn", "mlp", "moe_router"], has_experts=True, has_dense_mlps=True)


def transformer_config(**fields):
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 1, "bf16": True}
    offloads = {"fine_grained_activation_offloading": True} if "offload_modules" in fields else {}
    return TransformerConfig(**sizes | offloads | fields)


def test_modules_are_those_of_megatron():
    megatrons = [name for name in ACTIVATION_MODULES if name != LAYER_INPUT]
    for name in megatrons:
        names = ["core_attn", name] if name == "attn_proj" else [name]
        transformer_config(offload_modules=names, use_transformer_engine_op_fuser=name == "fused_group_mlp")
    with pytest.raises(AssertionError) as caught:
        transformer_config(offload_modules=["core_atn"])
    assert all(f"'{name}'" in str(caught.value) for name in megatrons)
    assert str(caught.value).partition("Allowed")[2].count("'") == 2 * len(megatrons)
    assert {module.name for module in CudaGraphModule} == {*GRAPH_MODULES, "moe", "mamba"}


GRAPH = {"cuda_graph_impl": "transformer_engine", "use_te_rng_tracker": True}
MOE = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 8,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
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
    ],
)  # fmt: skip
def test_what_has_no_rule_is_refused_by_megatrons_config(fields, message):
    """Each combination once had a rule here; megatron-core says the same when a worker, or `validate --deep`, asks."""
    with pytest.raises((AssertionError, ValueError), match=message):
        transformer_config(**fields)
