"""Modules that are offloaded, captured or recomputed: for each rule a recipe that breaks it, and those that pass."""

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
from nemo_offload_rl.config.rules import modules
from tests.unit.config.conftest import CONFIGS, each_of, names_of

MEGATRON = "policy.megatron_cfg"
OFFLOADED, CAPTURED = f"{MEGATRON}.offload_modules", f"{MEGATRON}.cuda_graph_modules"
OFFLOADING = f"{MEGATRON}.fine_grained_activation_offloading"
GRAPHS = f"{MEGATRON}.cuda_graph_impl"
# A model of experts; without the dense one that GRPO would start from.
EXPERTS = ["~warm_start", "policy.hf_config.model_type=qwen3_moe", "+policy.hf_config.num_experts=8"]
FUSER = f"+{MEGATRON}.use_transformer_engine_op_fuser=true"
FULL = f"{MEGATRON}.activation_checkpointing=true"
SELECTIVE = [FULL, f"{MEGATRON}.recompute_granularity=selective"]
PACKED = "policy.sequence_packing.enabled=true"
LENGTH, DIVISOR = "policy.max_total_sequence_length", "policy.make_sequence_length_divisible_by"
PIPELINE = [f"{MEGATRON}.pipeline_model_parallel_size=2", "cluster.gpus_per_node=2"]
ALONE = "~warm_start"  # whose micro-batch is for one rank
BF16 = ["policy.precision=bfloat16", f"{MEGATRON}.optimizer.bf16=true"]
CAPACITY = f"+{MEGATRON}.moe_expert_capacity_factor=1.5"


TILES = f"{MEGATRON}.mlp_tile_tokens"


def offload(*names):
    return [f"{OFFLOADING}=true", f"{OFFLOADED}=[{','.join(names)}]"]


def capture(*names, length=128):
    return [f"{GRAPHS}=transformer_engine", *BF16, f"{CAPTURED}=[{','.join(names)}]", f"{LENGTH}={length}"]


def recompute(*names):
    return [*SELECTIVE, f"{MEGATRON}.recompute_modules=[{','.join(names)}]"]


BROKEN = {
    "offload_modules_names": [
        [f"{OFFLOADING}=true"],
        offload("core_atn"),
    ],
    "cuda_graph_modules_names": [
        capture(),
        [*EXPERTS, *capture("moe")],
    ],
    "recompute_modules_names": [
        recompute("attn"),
        [FULL, f"{MEGATRON}.recompute_granularity=null"],
    ],
    "offload_modules_recomputed": [
        [*offload("core_attn"), FULL],
        [*offload("core_attn"), *SELECTIVE],
        [*offload("core_attn"), *recompute("mla_up_proj")],
        [*EXPERTS, *offload("moe_act", "expert_fc1"), *recompute("moe")],
        offload("layer_input"),
        [*offload("layer_input", "core_attn", "attn_proj"), FULL],
    ],
    "recompute_num_layers": [[FULL, f"+{MEGATRON}.recompute_num_layers={number}"] for number in (0, -1)],
    "recompute_method_layer_input": [
        [*offload("layer_input"), FULL, f"+{MEGATRON}.recompute_method=block"],
    ],
    "cuda_graph_modules_recomputed": [
        [*capture("attn"), FULL],
        [*EXPERTS, *capture("moe_router"), *recompute("moe")],
    ],
    "recompute_modules_fused_residual": [
        [*recompute("layernorm"), f"+{MEGATRON}.fused_residual_rmsnorm=true"],
    ],
    "mlp_tiles_recomputed": [
        [f"{TILES}=auto", *recompute("layernorm", "mlp")],
    ],
    "mlp_tiles_captured": [[f"{TILES}=64", *capture("attn", "mlp")]],
    "offload_modules_attn_proj": [offload("attn_proj")],
    "offloading_env_vars": [
        [*offload("core_attn"), f"{MEGATRON}.env_vars={{NVTE_CPU_OFFLOAD_V1: '0'}}"],
    ],
    "cuda_graph_modules_packing": [
        [*capture("attn", "mlp"), PACKED],
    ],
    "cuda_graph_attn_length": [
        capture("attn", length=1000),
        [*EXPERTS, *capture("attn", "moe_router", length=192)],
        [*capture("attn", length=120), f"{DIVISOR}=50"],
        [*capture("attn", length=384), f"{MEGATRON}.context_parallel_size=2", "cluster.gpus_per_node=2"],
    ],
    "cuda_graph_pipeline_packing": [
        [*EXPERTS, *capture("moe_router"), PACKED, *PIPELINE],
    ],
    "cuda_graph_offload_pipeline": [
        [*capture("attn"), *offload("qkv_linear", "core_attn"), *PIPELINE, ALONE],
        [*capture("attn", "mlp"), *offload("mlp_norm"), *PIPELINE, ALONE],
    ],
}


def test_each_rule_of_modules_has_a_recipe_that_breaks_it():
    assert {*BROKEN, "offloading_megatron_core_version"} == names_of(modules)


@each_of(BROKEN)
def test_a_broken_rule_is_one_problem_with_its_key_and_remedy(overrides, one_problem_of):
    one_problem_of(*overrides)


def test_another_megatron_core_is_refused(installed, error_of):
    installed(megatron_core="0.20.0")
    assert f"{OFFLOADING}: replaces a private part of megatron-core" in error_of(*offload("core_attn"))
    load(CONFIGS / "grpo_tiny_cpu.yaml")


def test_another_implementation_of_layers_is_refused(error_of):
    error = error_of(f"+{MEGATRON}.transformer_impl=local", *offload("core_attn"))
    assert f"{MEGATRON}.transformer_impl: is set by this package for the device it runs on" in error


def test_dynamic_batching_stays_refused(error_of):
    error = error_of(*capture("attn"), "+policy.dynamic_batching.enabled=true")
    assert "this package does not support dynamic batching (found true)" in error


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("moe_layer_recompute", "true", "list moe in policy.megatron_cfg.recompute_modules, and delete it"),
        ("moe_router_padding_for_quantization", "true", "fp8 and fp4 are not supported here yet"),
        ("moe_expert_rank_capacity_factor", "1.0", "is not supported here"),
        ("overlap_dispatch_backward_with_experts_wgrad", "true", "is not supported here"),
    ],
)
def test_fields_that_would_go_round_the_rules_are_refused(field, value, remedy, error_of):
    assert remedy in error_of(*EXPERTS, f"+{MEGATRON}.{field}={value}")


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{OFFLOADED}=null"],
        ["~policy.activation_offload"],
        offload("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
        [*EXPERTS, *offload("qkv_linear", "expert_fc1", "moe_act")],
        [*EXPERTS, FUSER, *offload("fused_group_mlp", "core_attn")],
        [f"{TILES}=64", *offload("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")],
        [f"{TILES}=64", *recompute("layernorm")],
        [f"{TILES}=auto", FULL],
        [f"{TILES}=auto", *capture("attn")],
        # With recomputation that does not count, or that discards outputs while inputs move.
        [*offload("core_attn"), f"{MEGATRON}.recompute_modules=[core_attn]"],
        [*offload("qkv_linear"), *SELECTIVE],
        [*offload("attn_norm", "mlp_norm"), *recompute("layernorm", "mlp")],
        [*EXPERTS, *offload("moe_act", "expert_fc1"), *recompute("moe_act")],
        [*offload("core_attn"), f"{MEGATRON}.env_vars={{NVTE_CPU_OFFLOAD_V1: '1'}}"],
        # megatron-core's defaults, where a recipe of NeMo-RL says nothing.
        [
            *offload("core_attn"),
            f"~{MEGATRON}.activation_offload_fraction",
            f"~{MEGATRON}.min_offloaded_tensor_size",
            f"~{MEGATRON}.delta_offload_bytes_across_pp_ranks",
            f"~{MEGATRON}.delay_offload_until_cuda_graph",
            f"~{MEGATRON}.fine_grained_offloading_max_inflight_offloads",
        ],
        # While graphs are off.
        [f"{CAPTURED}=[attn]", f"{LENGTH}=100"],
        [*offload("core_attn"), f"{CAPTURED}=[attn]", *PIPELINE, ALONE],
        capture("attn", "mlp"),
        [*EXPERTS, *capture("moe_router"), PACKED],
        capture("mlp", length=100),
        [*capture("attn", length=120), f"{DIVISOR}=64"],  # padded to 128
        # Outside of the graphs.
        [*EXPERTS, *capture("attn", "moe_router"), *offload("moe_act", "expert_fc1"), *PIPELINE],
        [*capture("mlp"), *offload("core_attn", "attn_proj"), *PIPELINE, ALONE],
        [*capture("attn"), *SELECTIVE],
        [*EXPERTS, *capture("moe_router"), *recompute("moe_act")],
        [*EXPERTS, CAPACITY, *offload("moe_act")],
        [*EXPERTS, CAPACITY, *capture("attn", "moe_router")],
    ],
    ids=str,
)
def test_what_works_is_accepted(overrides):
    load(CONFIGS / "grpo_tiny_cpu.yaml", overrides)


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


def test_overrides_of_the_config_count():
    kind = model_kind("a-label", {"model_type": "qwen3_moe"}, {"num_experts": 4}, None)
    assert kind.has_experts is True


@pytest.mark.parametrize("written", ["", "{", "[]"])
def test_a_config_that_cannot_be_read_tells_nothing(tmp_path, written):
    (tmp_path / "config.json").write_text(written)
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
    return TransformerConfig(**sizes | fields)


def offloading_config(*names, **fields):
    fuser = {"use_transformer_engine_op_fuser": "fused_group_mlp" in names}
    offloading = {"fine_grained_activation_offloading": True, "offload_modules": list(names)}
    return transformer_config(**fuser | offloading | fields)


def test_modules_are_those_of_megatron():
    megatrons = [name for name in ACTIVATION_MODULES if name != LAYER_INPUT]
    for name in megatrons:
        names = ("core_attn", name) if name == "attn_proj" else (name,)
        assert offloading_config(*names).offload_modules == list(names)
    with pytest.raises(AssertionError) as caught:
        offloading_config("core_atn")
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
    offloads = {"fine_grained_activation_offloading": True} if "offload_modules" in fields else {}
    with pytest.raises((AssertionError, ValueError), match=message):
        transformer_config(**offloads | fields)
