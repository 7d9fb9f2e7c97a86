"""Mixtures of experts in recipes: which layers have them, and how many tokens they take."""

import pytest

from nemo_offload_rl.config import load
from nemo_offload_rl.config.rules import RULES, experts
from tests.unit.config.conftest import CONFIGS, each_of
from tests.unit.config.test_activation_rules import EXPERTS, SELECTIVE, offload
from tests.unit.config.test_graph_rules import capture

MEGATRON = "policy.megatron_cfg"
CAPACITY = f"+{MEGATRON}.moe_expert_capacity_factor=1.5"
PADS = f"+{MEGATRON}.moe_pad_expert_input_to_capacity=true"
TENSOR_PARALLEL = [
    *(f"{MEGATRON}.tensor_model_parallel_size=2", "cluster.gpus_per_node=2"),
    "policy.make_sequence_length_divisible_by=2",
]


def experts_in(freq):
    return [*EXPERTS, f"+{MEGATRON}.moe_layer_freq={freq}"]


BROKEN = {
    "layers_with_experts_are_counted": [
        (
            experts_in("0"),
            "moe_layer_freq: must be an integer of 1 or more, or a list with 0 or 1 for each layer; found 0",
        ),
        (experts_in("[]"), "or a list with 0 or 1 for each layer; found []"),
        (experts_in("[0,1,2,1]"), "or a list with 0 or 1 for each layer; found [0, 1, 2, 1]"),
        (
            [*experts_in("[0,1,1,1]"), "+policy.hf_config_overrides={num_hidden_layers: 2}"],
            "has 4 numbers, one for each layer, but the model has 2 layers; give one number per layer",
        ),
        (
            experts_in("[0,1]"),
            "has 2 numbers, one for each layer, but the model has 4 layers; give one number per layer",
        ),
    ],
    "experts_behind_split_attention_have_split_sequences": [
        (
            [*EXPERTS, *TENSOR_PARALLEL, f"{MEGATRON}.sequence_parallel=false"],
            f"{MEGATRON}.sequence_parallel: is false, but megatron-core trains a mixture of experts with "
            f"{MEGATRON}.tensor_model_parallel_size 2 only with sequence parallelism; set this to true, or",
        ),
    ],
    "capacities_are_positive": [
        (
            [
                *EXPERTS,
                f"+{MEGATRON}.moe_expert_capacity_factor=-1.0",
                *capture("attn", "moe_router"),
                *offload("moe_act"),
            ],
            "must be above 0, or null for none; found -1.0",
        ),
    ],
    "padded_experts_have_a_capacity": [
        ([*EXPERTS, PADS], f"is true, which needs {MEGATRON}.moe_expert_capacity_factor, such as 1.0; found null"),
    ],
    "experts_that_drop_tokens_are_not_offloaded_beside_graphs": [
        (
            [*EXPERTS, CAPACITY, *capture("attn", "moe_router"), *offload("moe_act")],
            f"{MEGATRON}.moe_expert_capacity_factor: is 1.5, with which experts drop tokens, and that is not supported "
            f"with both {MEGATRON}.fine_grained_activation_offloading and {MEGATRON}.cuda_graph_impl transformer",
        ),
    ],
}


def test_each_rule_of_experts_has_a_recipe_that_breaks_it():
    assert set(BROKEN) == {rule.check.__name__ for rule in RULES if rule.check.__module__ == experts.__name__}


@each_of(BROKEN)
def test_a_broken_rule_is_one_problem_with_its_key_and_remedy(overrides, message, one_problem_of):
    assert message in one_problem_of(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        experts_in("2"),
        experts_in("[0,1,1,1]"),
        [*experts_in("[0,1]"), "+policy.hf_config_overrides={num_hidden_layers: 2}"],
        [*EXPERTS, CAPACITY, PADS],
        [*EXPERTS, *TENSOR_PARALLEL, f"{MEGATRON}.sequence_parallel=true"],
        ["~warm_start", *TENSOR_PARALLEL, f"{MEGATRON}.sequence_parallel=false"],
        [*EXPERTS, CAPACITY, *offload("moe_act")],
        [*EXPERTS, CAPACITY, *capture("attn", "moe_router")],
    ],
    ids=str,
)
def test_what_works_is_accepted(overrides):
    load(CONFIGS / "grpo_tiny_cpu.yaml", overrides)


def test_a_model_of_dense_layers_alone_has_no_experts_to_offload(error_of):
    error = error_of(*experts_in("[0,0,0,0]"), *offload("moe_act"))
    assert "names 'moe_act', which only a mixture-of-experts model has" in error


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("moe_layer_recompute", "true", "list moe in policy.megatron_cfg.recompute_modules, and delete it"),
        ("moe_router_padding_for_quantization", "true", "fp8 is not supported here yet (found"),
        ("moe_expert_rank_capacity_factor", "1.0", "is not supported here (found"),
        ("overlap_dispatch_backward_with_experts_wgrad", "true", "is not supported here (found"),
    ],
)
def test_fields_that_would_go_round_the_rules_are_refused(field, value, remedy, error_of):
    error = error_of(*EXPERTS, f"+{MEGATRON}.{field}={value}")
    assert f"{MEGATRON}.{field}: " in error
    assert remedy in error


def test_the_activation_of_experts_that_are_computed_one_by_one_is_not_recomputed(error_of):
    ungrouped = f"+{MEGATRON}.moe_grouped_gemm=false"
    error = error_of(*EXPERTS, ungrouped, *SELECTIVE, f"{MEGATRON}.recompute_modules=[moe_act]")
    assert f"has moe_act, which needs {MEGATRON}.moe_grouped_gemm true; found false: take it out, or set that" in error
