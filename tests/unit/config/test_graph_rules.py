"""CUDA graphs in recipes: for each rule those that break it, and those that it lets pass."""

import pytest
from megatron.core.transformer.enums import CudaGraphModule

from nemo_offload_rl.config import load
from nemo_offload_rl.config.megatron.graph_modules import GRAPH_MODULES, REFUSED_GRAPH_MODULES, check_graphs_fit_model
from nemo_offload_rl.config.rules import RULES, graphs
from tests.unit.config.conftest import CONFIGS, each_of
from tests.unit.config.test_activation_rules import EXPERTS, SELECTIVE, offload

MEGATRON = "policy.megatron_cfg"
MODULES = f"{MEGATRON}.cuda_graph_modules"
ON = f"{MEGATRON}.cuda_graph_impl=transformer_engine"
FULL = f"{MEGATRON}.activation_checkpointing=true"
PACKED = "policy.sequence_packing.enabled=true"
LENGTH, DIVISOR = "policy.max_total_sequence_length", "policy.make_sequence_length_divisible_by"
PIPELINE = [f"{MEGATRON}.pipeline_model_parallel_size=2", "cluster.gpus_per_node=2"]
ALONE = "~warm_start"  # whose micro-batch is for one rank
# Experts in some layers only.
MIXED = [*EXPERTS, f"+{MEGATRON}.moe_layer_freq=[0,1,1,1]"]


BF16 = ["policy.precision=bfloat16", f"{MEGATRON}.optimizer.bf16=true"]


def capture(*modules, length=128):
    return [ON, *BF16, f"{MODULES}=[{','.join(modules)}]", f"{LENGTH}={length}"]


def env_vars(**variables):
    return f"{MEGATRON}.env_vars={{{', '.join(f'{name}: {value!r}' for name, value in variables.items())}}}"


BROKEN = {
    "graphs_take_bfloat16": [
        (
            [ON, f"{MODULES}=[mlp]"],
            f"{MEGATRON}.cuda_graph_impl: is transformer_engine, whose graphs take bfloat16, but policy.precision is "
            "float32; set that to bfloat16, or this to none",
        ),
    ],
    "captured_residuals_are_bfloat16": [
        (
            [*capture("mlp"), f"+{MEGATRON}.fp32_residual_connection=true"],
            f"whose graphs take bfloat16, but {MEGATRON}.fp32_residual_connection is true; set that to false, or",
        ),
    ],
    "graphs_name_modules": [
        (
            [ON, *BF16],
            f"{MODULES}: must name the modules to capture while {MEGATRON}.cuda_graph_impl is transformer_engine: "
            "'attn',",
        ),
        ([ON, *BF16], f"found []: name some, or set {MEGATRON}.cuda_graph_impl to none"),
    ],
    "graph_modules_are_known": [
        (
            capture("atn"),
            "may hold 'attn', 'mlp', 'moe_router' or 'moe_preprocess'; found 'atn' (did you mean attn?)",
        ),
        (
            [*EXPERTS, *capture("moe")],
            "found 'moe': it captures only experts that drop tokens, which changes log-probs",
        ),
        (capture("full"), "found 'full': name the parts of a layer to capture instead"),
        (capture("mamba"), "found 'mamba': models with Mamba layers are not supported here"),
    ],
    "graph_modules_are_named_once": [(capture("attn", "attn"), "names 'attn' more than once; name each module once")],
    "moe_preprocess_needs_moe_router": [
        (
            [*EXPERTS, *capture("attn", "moe_preprocess")],
            "has moe_preprocess, which is captured with moe_router; found ['attn', 'moe_preprocess']; add moe_router",
        ),
    ],
    "captured_modules_are_in_the_model": [
        (
            capture("attn", "moe_router"),
            f"{MODULES}: names 'moe_router', which only mixture-of-experts layers have, and the model is dense; use",
        ),
        (
            [*EXPERTS, *capture("mlp")],
            "names 'mlp', which is captured in dense layers, and every layer of the model is a mixture of experts",
        ),
    ],
    "captured_preprocessing_does_not_wait": [
        (
            [*EXPERTS, *capture("moe_router", "moe_preprocess"), f"+{MEGATRON}.moe_expert_capacity_factor=1.5"],
            f"has moe_preprocess, which cannot be captured with {MEGATRON}.moe_expert_capacity_factor 1.5, since "
            "it then waits for a copy to the host",
        ),
    ],
    "captured_norms_are_not_offloaded": [
        (
            [*capture("attn"), *offload("attn_norm", "qkv_linear")],
            f"{MEGATRON}.offload_modules: has attn_norm, which cannot move while {MODULES} has attn, whose graph",
        ),
        (
            [*capture("attn"), *offload("mlp_norm")],
            f"has mlp_norm, which cannot move while {MODULES} is ['attn']: it lies at the edge of a graph; take it out",
        ),
        ([*capture("mlp"), *offload("mlp_norm")], "is ['mlp']: it lies at the edge of a graph"),
        ([*EXPERTS, *capture("attn"), *offload("mlp_norm")], "is ['attn']: it lies at the edge of a graph"),
        ([*EXPERTS, *capture("moe_router"), *offload("mlp_norm")], "is ['moe_router']: it lies at the edge of"),
        ([*MIXED, *capture("attn", "mlp"), *offload("mlp_norm")], "is ['attn', 'mlp']: it lies at the edge of a graph"),
    ],
    "captured_layers_have_fixed_shapes": [
        (
            [*capture("attn", "mlp"), PACKED],
            f"{MODULES}: has 'attn' and 'mlp', whose graphs take padded batches of policy.max_total_sequence_length, "
            "but policy.sequence_packing.enabled is true; set that to false, or capture none of attn and mlp",
        ),
        ([*EXPERTS, *capture("attn", "moe_router"), PACKED], "has 'attn', whose graphs take padded batches"),
    ],
    "captured_attention_runs_the_kernel_of_eager_passes": [
        (
            capture("attn", length=1000),
            f"{LENGTH}: must be a multiple of 128 while {MODULES} has attn; found 1000: at other lengths Transformer "
            "Engine runs another attention kernel in the graph than in eager passes, which gives other numbers and "
            "takes more memory; set it to 1024, or take attn out there",
        ),
        (capture("attn", "mlp", length=64), "found 64: at other lengths"),
        ([*EXPERTS, *capture("attn", "moe_router", length=192)], "more memory; set it to 256, or"),
        (
            [*capture("attn", length=120), f"{DIVISOR}=50"],
            f"found 120, which {DIVISOR} 50 makes 150: at other lengths",
        ),
        ([*capture("attn", length=128), f"{DIVISOR}=50"], "set it to 3200, or take attn out there"),
    ],
    "pipelined_graphs_have_a_fixed_number_of_micro_batches": [
        (
            [*EXPERTS, *capture("moe_router"), PACKED, *PIPELINE],
            f"{MEGATRON}.cuda_graph_impl: is transformer_engine with {MEGATRON}.pipeline_model_parallel_size 2, where "
            "graphs are captured for one number of micro-batches, but policy.sequence_packing.enabled is true",
        ),
    ],
    "graphs_are_captured_after_a_warm_up": [
        (
            [*capture("attn"), f"{MEGATRON}.cuda_graph_warmup_steps=0"],
            f"{MEGATRON}.cuda_graph_warmup_steps: must be at least 1 while {MEGATRON}.cuda_graph_impl is "
            "transformer_engine; found 0",
        ),
    ],
    "recomputed_layers_are_not_captured": [
        (
            [*capture("attn"), FULL],
            f"{MEGATRON}.cuda_graph_impl: is transformer_engine, but {MEGATRON}.activation_checkpointing with "
            "recompute_granularity full runs each layer twice",
        ),
    ],
    "captured_routers_are_not_recomputed": [
        (
            [*EXPERTS, *capture("moe_router"), *SELECTIVE, f"{MEGATRON}.recompute_modules=[moe]"],
            f"{MODULES}: has moe_router, but {MEGATRON}.recompute_modules holds moe, which contains the router",
        ),
    ],
    "graphs_with_expandable_segments_need_unregistered_nccl": [
        (
            [*capture("attn"), env_vars(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")],
            f'{MEGATRON}.env_vars: needs NCCL_GRAPH_REGISTER: "0" with PYTORCH_CUDA_ALLOC_CONF '
            "'expandable_segments:True' while",
        ),
        (
            [
                *capture("attn"),
                env_vars(PYTORCH_ALLOC_CONF="a:1,expandable_segments:True", NCCL_GRAPH_REGISTER="1"),
            ],
            "since NCCL would otherwise use addresses of memory that has been remapped; found '1'",
        ),
        ([*capture("attn"), env_vars(PYTORCH_ALLOC_CONF="expandable_segments: true")], "expandable_segments: true' wh"),
    ],
    "offloading_in_graphs_has_one_stage": [
        (
            [*capture("attn"), *offload("qkv_linear", "core_attn"), *PIPELINE, ALONE],
            f"{MODULES}: captures 'qkv_linear' and 'core_attn' of {MEGATRON}.offload_modules with "
            f"{MEGATRON}.pipeline_model_parallel_size 2, but copies inside captured graphs are supported on one "
            "pipeline stage; capture other parts, offload modules outside of the graph, or set the pipeline to 1",
        ),
        ([*capture("attn", "mlp"), *offload("mlp_norm"), *PIPELINE, ALONE], f"{MODULES}: captures 'mlp_norm' of"),
        (
            [*EXPERTS, *capture("attn", "moe_router"), *offload("core_attn", "attn_proj", "moe_act"), *PIPELINE],
            "captures 'core_attn' and 'attn_proj' of",
        ),
    ],
}
LIBRARIES = "offloading_in_graphs_has_its_libraries"


def test_each_rule_of_graphs_has_a_recipe_that_breaks_it():
    rules = {rule.check.__name__ for rule in RULES if rule.check.__module__ == graphs.__name__}
    assert set(BROKEN) | {LIBRARIES} == rules


@each_of(BROKEN)
def test_a_broken_rule_is_one_problem_with_its_key_and_remedy(overrides, message, one_problem_of):
    assert message in one_problem_of(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{MEGATRON}.cuda_graph_warmup_steps=0", f"{MODULES}=[nonsense]"],  # while graphs are off
        capture("attn"),
        capture("attn", "mlp"),
        [*capture("attn"), *PIPELINE, ALONE],
        [*EXPERTS, *capture("attn", "moe_router", "moe_preprocess")],
        [*EXPERTS, *capture("moe_router"), PACKED],
        [*EXPERTS, *capture("moe_router", length=100)],
        capture("mlp", length=100),
        [*capture("attn", length=120), f"{DIVISOR}=64"],  # padded to 128
        [f"{MODULES}=[attn]", f"{LENGTH}=100"],  # while graphs are off
        [
            *EXPERTS,
            *capture("attn", "moe_router"),
            *offload("moe_act", "expert_fc1"),
            *PIPELINE,
        ],  # outside of the graphs
        [*capture("mlp"), *offload("core_attn", "attn_proj"), *PIPELINE, ALONE],
        [*offload("core_attn"), f"{MODULES}=[attn]", *PIPELINE, ALONE],  # while graphs are off
        [*MIXED, *capture("attn", "mlp", "moe_router")],
        [*capture("attn"), *offload("qkv_linear", "core_attn", "attn_proj")],
        [*capture("mlp"), *offload("attn_norm", "core_attn")],
        [*capture("attn", "mlp"), *offload("mlp_norm")],
        [
            *EXPERTS,
            *capture("attn", "moe_router"),
            *offload("moe_act"),
            f"{MEGATRON}.delay_offload_until_cuda_graph=true",
        ],
        [*capture("attn"), *SELECTIVE],
        [*capture("attn"), f"{MEGATRON}.recompute_granularity=full"],  # without activation_checkpointing
        [*EXPERTS, *capture("moe_router"), *SELECTIVE, f"{MEGATRON}.recompute_modules=[moe_act]"],
        [*EXPERTS, *capture("moe_router"), f"+{MEGATRON}.moe_expert_capacity_factor=1.5"],
        [*capture("attn"), env_vars(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", NCCL_GRAPH_REGISTER="0")],
        [*capture("attn"), env_vars(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False")],
        [env_vars(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")],
    ],
    ids=str,
)
def test_what_works_is_accepted(overrides):
    load(CONFIGS / "grpo_tiny_cpu.yaml", overrides)


def test_dynamic_batching_stays_refused(error_of):
    error = error_of(*capture("attn"), "+policy.dynamic_batching.enabled=true")
    assert "this package does not support dynamic batching (found true)" in error


@pytest.mark.parametrize(
    ("torch", "transformer_engine", "too_old"),
    [
        ("2.8.0+cu128", "2.20.2", "which needs torch 2.9 or newer, found 2.8.0+cu128; install that"),
        ("2.9.0", "2.13.1", "which needs Transformer Engine 2.14 or newer, found 2.13.1; install"),
        ("2.8.1", "1.9", "torch 2.9 or newer, found 2.8.1 and Transformer Engine 2.14 or newer, found 1.9;"),
        ("2.9.0a0+git1", "2.14.0", None),
    ],
)
def test_offloading_in_graphs_has_its_libraries(torch, transformer_engine, too_old, installed, error_of):
    installed(torch=torch, transformer_engine=transformer_engine)
    inside = [*capture("attn"), *offload("qkv_linear", "core_attn")]
    if too_old is None:
        load(CONFIGS / "grpo_tiny_cpu.yaml", inside)
    else:
        error = error_of(*inside)
        assert f"{MODULES}: captures 'qkv_linear' and 'core_attn' of {MEGATRON}.offload_modules, which needs " in error
        assert too_old in error
    load(CONFIGS / "grpo_tiny_cpu.yaml", [*capture("mlp"), *offload("core_attn")])  # outside of the graphs


def test_what_the_recipe_cannot_tell_is_checked_against_the_model_that_was_built():
    unknown = ["policy.sequence_packing.enabled=false"]
    load(CONFIGS / "grpo_math_1B_megatron.yaml", [*unknown, *capture("moe_router")])  # a hub name
    with pytest.raises(ValueError, match=r"policy\.megatron_cfg\.cuda_graph_modules: names 'moe_router', which only"):
        check_graphs_fit_model(["moe_router"], has_experts=False, has_dense_mlps=True)
    with pytest.raises(ValueError, match="names 'mlp', which is captured in dense layers"):
        check_graphs_fit_model(["attn", "mlp"], has_experts=True, has_dense_mlps=False)
    check_graphs_fit_model(["attn", "mlp", "moe_router"], has_experts=True, has_dense_mlps=True)


def test_modules_are_those_of_megatron():
    assert {module.name for module in CudaGraphModule} == set(GRAPH_MODULES) | (
        {"moe", "mamba"} & set(REFUSED_GRAPH_MODULES)
    )
