"""Activation offloading in recipes: for each rule those that break it, and those that it lets pass."""

import json

import pytest
from megatron.core.transformer import TransformerConfig

from nemo_offload_rl.config import load
from nemo_offload_rl.config.megatron.activation_modules import ACTIVATION_MODULES, check_modules_fit_model
from nemo_offload_rl.config.model.model_kind import model_kind
from nemo_offload_rl.config.rules import RULES, activations
from tests.unit.config.conftest import CONFIGS, each_of

MEGATRON = "policy.megatron_cfg"
MODULES = f"{MEGATRON}.offload_modules"
ON = f"{MEGATRON}.fine_grained_activation_offloading=true"
# A model of experts; without the dense one that GRPO would start from.
EXPERTS = ["~warm_start", "policy.hf_config.model_type=qwen3_moe", "+policy.hf_config.num_experts=8"]
FUSER = f"+{MEGATRON}.use_transformer_engine_op_fuser=true"
UNFUSED = f"{MEGATRON}.env_vars={{NVTE_CUTEDSL_FUSED_GROUPED_MLP: '0'}}"
HUB_NAME = ["~warm_start", "policy.model_name=org/model", "policy.hf_config=null", "policy.tokenizer.name=x"]
TWO_RANKS_AN_EXPERT = [f"{MEGATRON}.expert_tensor_parallel_size=2", "cluster.gpus_per_node=2"]
STRICT = "policy.activation_offload.strict=true"
SELECTIVE = [f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.recompute_granularity=selective"]


def offload(*modules):
    return [ON, f"{MODULES}=[{','.join(modules)}]"]


BROKEN = {
    "offloading_names_modules": [
        (
            [ON],
            f"{MODULES}: must name the modules whose activations are offloaded while "
            f"{MEGATRON}.fine_grained_activation",
        ),
        ([ON, f"{MODULES}=[]"], "'moe_act' or 'fused_group_mlp'; found []"),
        ([ON, f"{MODULES}=null"], "'moe_act' or 'fused_group_mlp'; found null"),
    ],
    "offload_modules_are_known": [
        (offload("core_atn"), f"{MODULES}: may hold 'attn_norm', 'qkv_linear', 'core_attn', 'attn_proj', 'mlp_norm',"),
        (offload("core_atn"), "found 'core_atn' (did you mean core_attn?)"),
        (offload("QKV_LINEAR"), "found 'QKV_LINEAR' (did you mean qkv_linear?)"),
        (offload("core_attn", "zzz", "mlp_nrm"), "found 'zzz' and 'mlp_nrm' (did you mean mlp_norm?)"),
    ],
    "offload_modules_are_named_once": [
        (offload("core_attn", "core_attn"), "names 'core_attn' more than once; name each module once"),
    ],
    "attn_proj_needs_core_attn": [
        (
            offload("qkv_linear", "attn_proj"),
            "has attn_proj without core_attn; found ['qkv_linear', 'attn_proj']: the input of attn_proj is the output "
            "of core_attn, which stays on the GPU for core_attn's backward pass; add core_attn",
        ),
    ],
    "expert_modules_need_experts": [
        (
            offload("core_attn", "moe_act", "expert_fc1"),
            "names 'moe_act' and 'expert_fc1', which only a mixture-of-experts model has, but policy.hf_config is a "
            "dense model; a dense model has attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm",
        ),
        ([*offload("fused_group_mlp"), FUSER], "names 'fused_group_mlp', which only a mixture-of-experts model has"),
    ],
    "expert_modules_need_grouped_gemm": [
        (
            [*EXPERTS, *offload("moe_act"), f"+{MEGATRON}.moe_grouped_gemm=false"],
            f"names 'moe_act', which needs {MEGATRON}.moe_grouped_gemm true, since megatron-core offloads only grouped "
            "experts; found false: set that to true, or take 'moe_act' out",
        ),
        (
            [*EXPERTS, FUSER, *offload("fused_group_mlp"), f"+{MEGATRON}.moe_grouped_gemm=false"],
            f"names 'fused_group_mlp', which needs {MEGATRON}.moe_grouped_gemm true",
        ),
    ],
    "fused_group_mlp_moves_as_a_whole": [
        (
            [*EXPERTS, FUSER, *offload("fused_group_mlp", "expert_fc1", "moe_act")],
            "has fused_group_mlp with 'expert_fc1' and 'moe_act', which are parts of it; keep the whole where",
        ),
    ],
    "fused_group_mlp_needs_op_fuser": [
        (
            [*EXPERTS, *offload("fused_group_mlp")],
            f"names 'fused_group_mlp', which needs {MEGATRON}.use_transformer_engine_op_fuser true; found null",
        ),
        (
            [*EXPERTS, *offload("fused_group_mlp"), FUSER.replace("true", "false")],
            "use_transformer_engine_op_fuser true; found false: set it, or name expert_fc1 and moe_act instead",
        ),
    ],
    "fused_experts_have_no_parts": [
        ([*EXPERTS, FUSER, *offload("moe_act")], "names 'moe_act', which is fused while policy.megatron_cfg.use_tr"),
    ],
    "fused_experts_are_switched_on_in_workers": [
        (
            [*EXPERTS, FUSER, UNFUSED],
            f'{MEGATRON}.env_vars.NVTE_CUTEDSL_FUSED_GROUPED_MLP: must be "1" while {MEGATRON}.use_transformer_engine'
            "_op_fuser is true, or no fused experts can be built; found '0'; delete it, since workers set it",
        ),
        (
            [*HUB_NAME, FUSER, *offload("fused_group_mlp"), UNFUSED],
            f'{MEGATRON}.env_vars.NVTE_CUTEDSL_FUSED_GROUPED_MLP: must be "1"',
        ),
    ],
    "fused_experts_are_whole": [
        (
            [*EXPERTS, FUSER, *offload("fused_group_mlp"), *TWO_RANKS_AN_EXPERT],
            f"{MEGATRON}.expert_tensor_parallel_size: must be 1 while {MEGATRON}.use_transformer_engine_op_fuser is "
            "true, which does not support expert tensor parallelism; found 2: set this to 1, or that to false",
        ),
    ],
    "fused_experts_are_grouped": [
        (
            [*EXPERTS, FUSER, f"+{MEGATRON}.moe_grouped_gemm=false"],
            f"{MEGATRON}.moe_grouped_gemm: must be true while {MEGATRON}.use_transformer_engine_op_fuser is true, "
            "which fuses grouped experts only; found false: set this to true, or that to false",
        ),
    ],
    "fused_experts_scale_their_output": [
        (
            [*EXPERTS, FUSER, *offload("fused_group_mlp"), f"+{MEGATRON}.moe_apply_probs_on_input=true"],
            f"{MEGATRON}.moe_apply_probs_on_input: must be false while {MEGATRON}.use_transformer_engine_op_fuser is "
            "true, since fused experts apply the router's probabilities after the activation; found true: set "
            "either to false",
        ),
    ],
    "recomputed_layers_keep_nothing_to_offload": [
        (
            [*offload("core_attn"), f"{MEGATRON}.activation_checkpointing=true"],
            f"{MEGATRON}.fine_grained_activation_offloading: is true, but {MEGATRON}.activation_checkpointing with "
            "recompute_granularity full keeps no activations inside a layer that could move",
        ),
    ],
    "recomputed_activations_are_not_offloaded": [
        (
            [*offload("core_attn"), *SELECTIVE],
            f"names 'core_attn', but {MEGATRON}.recompute_modules is null, which means core_attn: recomputed attention "
            "does not offload; take 'core_attn' out here, or name other modules there (or [])",
        ),
        (
            [*offload("core_attn"), *SELECTIVE, f"{MEGATRON}.recompute_modules=[layernorm,core_attn]"],
            "recompute_modules holds core_attn: recomputed attention does not offload",
        ),
        (
            [*offload("core_attn"), *SELECTIVE, f"{MEGATRON}.recompute_modules=[mla_up_proj]"],
            "holds mla_up_proj: it recomputes the queries, keys and values that core_attn would offload",
        ),
        (
            [*EXPERTS, *offload("moe_act", "expert_fc1"), *SELECTIVE, f"{MEGATRON}.recompute_modules=[moe]"],
            "names 'moe_act' and 'expert_fc1', but policy.megatron_cfg.recompute_modules holds moe: it computes the "
            "experts again from their input",
        ),
    ],
    "delayed_offload_needs_graphs": [
        (
            [f"{MEGATRON}.delay_offload_until_cuda_graph=true"],
            f"is true, which needs {MEGATRON}.fine_grained_activation_offloading to be true; found false",
        ),
        (
            [f"{MEGATRON}.delay_offload_until_cuda_graph=true", *offload("core_attn")],
            f"is true, which needs {MEGATRON}.cuda_graph_impl to be transformer_engine; found none: set that",
        ),
    ],
    "transformer_engine_leaves_offloading_to_megatron": [
        (
            [*offload("core_attn"), f"{MEGATRON}.env_vars={{NVTE_CPU_OFFLOAD_V1: '0'}}"],
            f'{MEGATRON}.env_vars.NVTE_CPU_OFFLOAD_V1: must be "1" while',
        ),
    ],
    "strictness_lets_something_leave": [
        (
            [*offload("core_attn"), STRICT, f"{MEGATRON}.activation_offload_fraction=0"],
            f"policy.activation_offload.strict: is true, but {MEGATRON}.activation_offload_fraction is 0, so that",
        ),
    ],
    "activations_fit_into_host_memory_limit": [
        (
            [
                *offload("core_attn"),
                "policy.activation_offload.host_memory_limit_gib=9",
                "policy.residency.host_memory_limit_gib=8",
            ],
            "policy.activation_offload.host_memory_limit_gib: is 9, above policy.residency.host_memory_limit_gib (8), "
            "which includes it; lower it, or raise that",
        ),
    ],
}


OF_LIBRARIES = {"fused_experts_have_their_library", "offloading_knows_megatron_core"}


def test_each_rule_of_activations_has_a_recipe_that_breaks_it():
    rules = {rule.check.__name__ for rule in RULES if rule.check.__module__ == activations.__name__}
    assert set(BROKEN) | OF_LIBRARIES == rules


def test_another_megatron_core_is_refused(installed, error_of):
    installed(megatron_core="0.20.0")
    assert (
        f"{MEGATRON}.fine_grained_activation_offloading: replaces a private part of megatron-core and was tested "
        "only with 0.19.2, but 0.20.0 is installed; install a tested version, or set the key to false"
    ) in error_of(*offload("core_attn"))
    load(CONFIGS / "grpo_tiny_cpu.yaml")


def test_fused_experts_have_their_library(installed, error_of):
    installed(transformer_engine="2.13.1")
    error = error_of(*EXPERTS, FUSER)
    assert (
        f"{MEGATRON}.use_transformer_engine_op_fuser: is true, and fused experts need Transformer Engine 2.14 or "
        "newer, found 2.13.1; install that, or set it to false"
    ) in error
    load(CONFIGS / "grpo_tiny_cpu.yaml", [FUSER])  # a dense model


def test_another_implementation_of_layers_is_refused(error_of):
    error = error_of(f"+{MEGATRON}.transformer_impl=local", *offload("core_attn"))
    assert (
        f"{MEGATRON}.transformer_impl: is set by this package for the device it runs on (found 'local'); delete"
        in error
    )


@each_of(BROKEN)
def test_a_broken_rule_is_one_problem_with_its_key_and_remedy(overrides, message, one_problem_of):
    assert message in one_problem_of(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{MODULES}=null"],
        ["~policy.activation_offload"],
        ["policy.activation_offload={}"],
        ["policy.activation_offload={strict: true, host_memory_limit_gib: 2.5}", *offload("core_attn")],
        [
            *offload("core_attn"),
            "policy.activation_offload.host_memory_limit_gib=8",
            "policy.residency.host_memory_limit_gib=8",
        ],
        ["policy.activation_offload.host_memory_limit_gib=9", "policy.residency.host_memory_limit_gib=8"],
        [STRICT, f"{MEGATRON}.activation_offload_fraction=0"],
        offload("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
        [*EXPERTS, *offload("qkv_linear", "expert_fc1", "moe_act")],
        [*EXPERTS, FUSER, *offload("fused_group_mlp", "core_attn")],
        [*EXPERTS, FUSER],
        [*EXPERTS, FUSER, *offload("fused_group_mlp"), UNFUSED.replace("'0'", "'1'")],
        # What fused experts cannot have concerns neither others, nor dense models, nor where nothing tells of experts.
        [*EXPERTS, UNFUSED, *TWO_RANKS_AN_EXPERT, f"+{MEGATRON}.moe_apply_probs_on_input=true"],
        [FUSER, UNFUSED, f"+{MEGATRON}.moe_grouped_gemm=false"],
        [*HUB_NAME, FUSER, UNFUSED],
        # With recomputation that does not count, or that discards outputs while inputs move.
        [*offload("core_attn"), f"{MEGATRON}.recompute_modules=[core_attn]"],
        [*offload("qkv_linear"), *SELECTIVE],
        [*offload("attn_norm", "mlp_norm"), *SELECTIVE, f"{MEGATRON}.recompute_modules=[layernorm, mlp]"],
        [*EXPERTS, *offload("moe_act", "expert_fc1"), *SELECTIVE, f"{MEGATRON}.recompute_modules=[moe_act]"],
        [*EXPERTS, *offload("core_attn"), *SELECTIVE, f"{MEGATRON}.recompute_modules=[moe]"],
        [*offload("core_attn"), f"{MEGATRON}.env_vars={{NVTE_CPU_OFFLOAD_V1: '1'}}"],
        [
            *offload("core_attn"),
            f"{MEGATRON}.activation_offload_fraction=0",
            f"{MEGATRON}.min_offloaded_tensor_size=0",
            f"{MEGATRON}.fine_grained_offloading_max_inflight_offloads=0",
            f"{MEGATRON}.delta_offload_bytes_across_pp_ranks=1048576",
        ],
        # megatron-core's defaults, where a recipe of NeMo-RL says nothing.
        [
            *offload("core_attn"),
            f"~{MEGATRON}.activation_offload_fraction",
            f"~{MEGATRON}.min_offloaded_tensor_size",
            f"~{MEGATRON}.delta_offload_bytes_across_pp_ranks",
            f"~{MEGATRON}.delay_offload_until_cuda_graph",
            f"~{MEGATRON}.fine_grained_offloading_max_inflight_offloads",
        ],
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


def test_a_models_folder_tells_its_kind(tmp_path, error_of):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    overrides = ["~warm_start", f"policy.model_name={tmp_path}", "policy.hf_config=null", "policy.tokenizer.name=x"]
    error = error_of(*overrides, *offload("moe_act"))
    assert f"names 'moe_act', which only a mixture-of-experts model has, but the model '{tmp_path}' is a dense" in error


def test_what_the_recipe_cannot_tell_is_checked_against_the_model_that_was_built():
    load(CONFIGS / "grpo_math_1B_megatron.yaml", offload("moe_act"))  # a hub name
    with pytest.raises(ValueError, match=r"policy\.megatron_cfg\.offload_modules: names 'moe_act', which only a mixt"):
        check_modules_fit_model(["core_attn", "moe_act"], is_moe=False)
    check_modules_fit_model(["core_attn", "attn_proj"], is_moe=False)
    check_modules_fit_model(ACTIVATION_MODULES, is_moe=True)


def transformer_config(*modules):
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        fine_grained_activation_offloading=True,
        offload_modules=list(modules),
        use_transformer_engine_op_fuser="fused_group_mlp" in modules,
    )


def test_modules_are_those_of_megatron():
    for name in ACTIVATION_MODULES:
        modules = ("core_attn", name) if name == "attn_proj" else (name,)
        assert transformer_config(*modules).offload_modules == list(modules)
    with pytest.raises(AssertionError) as caught:
        transformer_config("core_atn")
    assert all(f"'{name}'" in str(caught.value) for name in ACTIVATION_MODULES)
    assert str(caught.value).partition("Allowed")[2].count("'") == 2 * len(ACTIVATION_MODULES)
