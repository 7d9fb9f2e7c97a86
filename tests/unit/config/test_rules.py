"""What must hold between keys: for each rule a recipe that breaks it, through overrides of an exemplar."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nemo_offload_rl
from nemo_offload_rl.config import load
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.installed.declared_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.keys.schema_problems import value_at
from nemo_offload_rl.config.keys.tree import find_key
from nemo_offload_rl.config.rules import NOTES, RULES, model, modules, pairs, vllm
from nemo_offload_rl.config.rules import parallel as batches
from nemo_offload_rl.config.rules.base import SECTION, SPEC
from nemo_offload_rl.config.upstream import duration_s
from tests.unit.config.conftest import CONFIGS
from tests.unit.config.test_module_rules import CAPACITY, EXPERTS, capture, offload

MEGATRON = "policy.megatron_cfg"
TP = f"{MEGATRON}.tensor_model_parallel_size"
PP = f"{MEGATRON}.pipeline_model_parallel_size"
EP = f"{MEGATRON}.expert_model_parallel_size"
VIRTUAL_STAGES = [
    *("~warm_start", f"{PP}=2", "cluster.gpus_per_node=2"),
    f"+{MEGATRON}.virtual_pipeline_model_parallel_size=2",
]
PACKED = ["policy.sequence_packing.enabled=true"]
CAPTURED_AND_PACKED = [
    *(*PACKED, "policy.precision=bfloat16", f"{MEGATRON}.optimizer.bf16=true"),
    *(f"{MEGATRON}.cuda_graph_impl=transformer_engine", f"{MEGATRON}.cuda_graph_modules=[moe_router]"),
    *("~warm_start", "policy.hf_config.model_type=qwen3_moe", "+policy.hf_config.num_experts=4"),
    "+policy.hf_config.num_experts_per_tok=2",
]
TENSOR_PARALLEL = [
    *(f"{TP}=2", "cluster.gpus_per_node=2", f"{MEGATRON}.sequence_parallel=true"),
    "policy.make_sequence_length_divisible_by=2",
]
TIS = "loss_fn.truncated_importance_sampling"
CORRECTED = "loss_fn.use_importance_sampling_correction=true"
APART = [
    *("~warm_start", "policy.generation.colocated.enabled=false", "cluster.gpus_per_node=2"),
    "policy.generation.colocated.resources.gpus_per_node=1",
]
STREAMED = ["++policy.residency.table.train.optimizer_state=streamed"]

BROKEN = {
    "logprob_chunk_size": ["++policy.logprob_chunk_size=64"],
    "parallel_world_size": [f"{TP}=2"],
    "cluster_segment_size": ["cluster.num_nodes=4", "++cluster.segment_size=3"],
    "virtual_pipeline_micro_batches": [*VIRTUAL_STAGES, "policy.train_micro_batch_size=512"],
    "pipeline_layers": [f"{PP}=3", "cluster.gpus_per_node=3"],
    "tensor_parallel_heads": [f"{TP}=8", "cluster.gpus_per_node=8"],
    "expert_parallel_experts": [f"{EP}=2", "cluster.gpus_per_node=2"],
    "sequence_parallel_experts": [*EXPERTS, *TENSOR_PARALLEL, f"{MEGATRON}.sequence_parallel=false"],
    "sequence_parallel_length": [
        f"{TP}=2",
        "cluster.gpus_per_node=2",
        f"{MEGATRON}.sequence_parallel=true",
        "policy.make_sequence_length_divisible_by=3",
    ],
    "moe_expert_capacity_factor": [*EXPERTS, CAPACITY, *capture("attn", "moe_router"), *offload("moe_act")],
    "batch_micro_batches": ["policy.train_micro_batch_size=100"],
    "dpo_loss_weights": ["dpo.preference_loss_weight=0.0", "dpo.sft_loss_weight=0.0"],
    "dataset_default_keys": ["data.train={_override_: true, dataset_name: my_package.MyDataset, processor: mine}"],
    "packing_sizes": [*PACKED, "~policy.sequence_packing.logprob_mb_tokens"],
    "packing_row_sizes": [*CAPTURED_AND_PACKED, "policy.sequence_packing.logprob_mb_tokens=auto"],
    "optimizer_bf16": ["policy.precision=bfloat16"],
    "optimizer_distributed": [f"{MEGATRON}.optimizer.optimizer=sgd"],
    "optimizer_state_types": [f"+{MEGATRON}.optimizer.exp_avg_dtype=bfloat16"],
    "cpu_optimizer_fraction": [f"{MEGATRON}.optimizer.optimizer_cpu_offload=true"],
    "residency_table_cells": ["+policy.residency.table.train.grads=dropped"],
    "residency_streamed_optimizer": [
        "+policy.residency.table.train.optimizer_state=streamed",
        f"{MEGATRON}.optimizer.optimizer=sgd",
        f"{MEGATRON}.optimizer.use_distributed_optimizer=false",
    ],
    "residency_generation_weights": ["+policy.residency.generation_weights=discard"],
    "residency_table_flags": [
        "policy.offload_optimizer_for_refit=true",
        "+policy.residency.table.generate.optimizer_state=keep",
    ],
    "checkpoint_fully_reshardable": [f"+{MEGATRON}.checkpoint.dist_ckpt_optim_fully_reshardable=true"],
    "checkpoint_must_save_by": ["checkpointing.checkpoint_must_save_by='03:45:00'"],
    "grpo_step_samples": ["policy.train_global_batch_size=768"],
    "grpo_num_generations": ["grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=512"],
    "grpo_reward_shaping": ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=null"],
    "grpo_batch_multiplier": ["grpo.batch_multiplier=1.5"],
    "grpo_pass_k": ["grpo.stop_at_validation_metric=val:pass_k"],
    "grpo_async_replayed": [
        "grpo.async_grpo={enabled: true, max_trajectory_age_steps: 0}",
        "grpo.debug.replay_rollouts=a",
    ],
    "grpo_async_generation_weights": [
        "grpo.async_grpo={enabled: true, max_trajectory_age_steps: 0}",
        "policy.generation.backend=vllm",
        "+policy.residency.generation_weights=host",
    ],
    "grpo_async_correction": [
        *APART,
        "grpo.async_grpo.enabled=true",
        "loss_fn.use_importance_sampling_correction=false",
    ],
    "grpo_replay_rollouts": ["grpo.debug.replay_rollouts=a", "grpo.debug.save_rollouts=b"],
    "logger_profile": ["++logger.profile={steps: [1, 2], trace: false}"],
    "grpo_adv_estimator": ["grpo.adv_estimator.normalize_rewards=false"],
    "loss_truncated_importance_sampling": [CORRECTED, f"{TIS}_type=icepop", f"{TIS}_ratio=2.0"],
    "loss_force_on_policy_ratio": ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=256"],
    "dataset_split_seed": [
        "data.train={_override_: true, dataset_name: HFDataset, data_path: d, input_key: q, output_key: a,"
        " split_validation_size: 0.1}"
    ],
    "dataset_keys": ["data.train={_override_: true, dataset_name: gsm8k, split: validation}"],
    "dataset_validation_split": ["+data.validation.split_validation_size=8"],
    "validation_data": ["data.validation=null"],
    "validation_printed_samples": ["++logger.num_val_samples_to_print=2"],
    "validation_stop_target": ["grpo.stop_at_validation_metric=val:acc"],
    "checkpoint_metric": ["checkpointing.metric_name=val:val_loss"],
    "env_name": ["data.default.env_name=x"],
    "env_reward": ["+env.arithmetic.math_verify_impl=dapo_math_verify"],
}


# Rules that no GRPO recipe breaks, though they read nothing of another section: the recipe that does.
OF_RECIPE = {"validation_printed_samples": "sft", "logprob_chunk_size": "sft"}

# Topics that have a test file of their own.
OWN_FILE = (model, modules, vllm)
ELSEWHERE = tuple(topic.__name__ for topic in OWN_FILE)


# Without the rows of `rules.pairs`; one that is registered for several keys once.
FUNCTIONS = [
    *{rule.check: rule for rule in RULES if hasattr(rule.check, "__name__") and rule.check.__module__ not in ELSEWHERE}
    .values()
]  # fmt: skip


@pytest.mark.parametrize(
    "rule",
    FUNCTIONS,
    ids=lambda rule: rule.check.__name__,
)
def test_a_broken_rule_is_one_problem_with_its_key_and_remedy(rule, error_of):
    overrides = BROKEN[rule.check.__name__]
    sections = {read.partition(".")[0] for read in rule.reads} & {"sft", "dpo"}
    algorithm = OF_RECIPE.get(rule.check.__name__, next(iter(sections), "grpo"))
    error_of(*overrides, recipe=CONFIGS / f"{algorithm}_tiny_cpu.yaml")


@pytest.mark.parametrize(
    "overrides",
    [
        [*PACKED, "++policy.sequence_packing.algorithm=modified_ffd"],
        [*PACKED, *TENSOR_PARALLEL, "policy.sequence_packing.sequence_length_round=3"],
        [*EXPERTS, f"{MEGATRON}.expert_tensor_parallel_size=2"],
        [*STREAMED, f"{MEGATRON}.optimizer.use_precision_aware_optimizer=true",
             f"+{MEGATRON}.optimizer.exp_avg_dtype=bfloat16"],
        [*STREAMED, f"{MEGATRON}.optimizer.optimizer_cpu_offload=true",
             f"{MEGATRON}.optimizer.optimizer_offload_fraction=0.5"],
        ["~policy.offload_optimizer_for_logprob",
             "policy.residency.table={train: {optimizer_state: streamed}, logprob: {optimizer_state: gpu}}"],
        ["policy.residency.table={refit: {optimizer_state: host}, generate: {optimizer_state: auto}}"],
        ["+policy.residency.table.refit.params=keep"],
        ["policy.offload_optimizer_for_logprob=true", "+policy.residency.table.logprob.optimizer_state=gpu"],
        ["env.arithmetic.reward=python"],
        ["~data.default.env_name"],
    ],
)  # fmt: skip
def test_other_ways_to_break_a_rule(overrides, one_problem_of):
    one_problem_of(*dict.fromkeys(["~warm_start", *overrides]))


@pytest.mark.parametrize(
    "override",
    [
        "adam_beta1=1.0",
        "adam_beta2=1",
        "adam_beta1=-0.1",
        "adam_beta2=nan",
        "adam_eps=0",
        "lr=-1e-3",
        "lr=nan",
        "weight_decay=-1",
        "sgd_momentum=1.0",
        "clip_grad=nan",
    ],
)
def test_values_that_no_optimizer_takes_are_refused(override, error_of):
    """torch's optimizers refuse most of them; Transformer Engine's compute NaN, or train on silently."""
    error_of(f"{MEGATRON}.optimizer.{override}")


@pytest.mark.parametrize(
    ("key", "argument"),
    [
        ("lr", {"lr": -1e-3}),
        ("lr", {"lr": math.nan}),
        ("adam_eps", {"eps": -1e-8}),
        ("weight_decay", {"weight_decay": -0.1}),
        ("adam_beta1", {"betas": (1.0, 0.9)}),
        ("adam_beta2", {"betas": (0.9, 1.0)}),
        ("adam_beta2", {"betas": (0.9, -0.1)}),
        ("sgd_momentum", {"momentum": -0.1}),
    ],
    ids=str,
)
def test_what_torch_refuses_is_refused(key, argument, error_of):
    kind = torch.optim.SGD if key == "sgd_momentum" else torch.optim.AdamW
    with pytest.raises(ValueError, match="Invalid"):
        kind([torch.zeros(1)], **argument)
    [value] = argument.values()
    value = value[key.endswith("2")] if isinstance(value, tuple) else value
    assert f"optimizer.{key}: must be " in error_of(f"{MEGATRON}.optimizer.{key}={value}")


def test_recipes_keep_groups_whole():
    pairs = replace(ALGORITHMS["sft"], name="pairs", group_size=2)
    packing = (True, 96, None, 64, "modified_first_fit_decreasing", 64)
    assert batches.packing_sizes(*packing, ALGORITHMS["sft"]) is None
    assert "train_mb_tokens (96) to be at least 2 x policy.max_total_seq" in batches.packing_sizes(*packing, pairs)


def test_rules_read_keys_that_exist():
    for rule in [*RULES, *NOTES]:
        for read in rule.reads:
            path = read.removesuffix("?")
            section, _, name = path.rpartition(".")
            is_megatron = section in SECTIONS and name in megatron_fields(section)
            found = [find_key(spec.schema, path.replace(SECTION, spec.name)) for spec in ALGORITHMS.values()]
            assert is_megatron or read == SPEC or any(found), path


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.validation=null"],
        ["sft.stop_at_validation_metric=null"],
        ["sft.val_period=0"],
        ["sft.stop_at_validation_metric=val:accuracy"],
    ],
)
def test_validation_needs_data_and_a_stop_target_metric_value_and_validation(overrides, error_of):
    error_of(*overrides, recipe=CONFIGS / "sft_tiny_cpu.yaml")


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.residency.table=null"],
        ["+policy.residency.table.refit.optimizer_state=host"],
        ["policy.offload_optimizer_for_refit=false", "+policy.residency.table.generate.optimizer_state=keep"],
        ["~policy.offload_optimizer_for_refit", "+policy.residency.table.generate.optimizer_state=gpu"],
        ["policy.residency.table={train: {params: gpu}, generate: {params: keep, grads: keep}}", "policy.numa=3"],
        ["~policy.residency", "~policy.numa"],
    ],
)
def test_cells_that_contradict_nothing_pass(overrides):
    load(CONFIGS / "grpo_tiny_cpu.yaml", overrides)


@pytest.mark.parametrize(
    ("ranks", "fields", "refused"),
    [
        (f"{PP}=3", {"num_hidden_layers": 6}, None),
        (f"{PP}=2", {"num_hidden_layers": 3}, "3 of the model's 3 layers cannot be split evenly over 2 stages"),
        (f"{TP}=3", {"num_attention_heads": 6}, None),
        (f"{TP}=2", {"num_attention_heads": 3}, "does not divide the model's 3 attention heads"),
        (f"{EP}=3", {"num_experts": 6, "num_experts_per_tok": 2}, None),
        (f"{EP}=2", {"num_experts": 3, "num_experts_per_tok": 2}, "does not divide the model's 3 experts"),
        (f"{EP}=2", {}, None),  # its default is known to transformers
    ],
)
@pytest.mark.parametrize("where", ["hf_config_overrides", "a folder"])
def test_a_models_sizes_are_read_wherever_they_are(ranks, fields, refused, where, tmp_path, error_of):
    key, number = ranks.split("=")
    overrides = [ranks, f"cluster.gpus_per_node={number}", "policy.train_global_batch_size=6"]
    overrides += ["policy.train_micro_batch_size=1", "grpo.num_prompts_per_step=3", "grpo.num_generations_per_prompt=2"]
    model_type = "qwen3_moe" if key == EP else "qwen3"
    if where == "a folder":
        sizes = {"num_key_value_heads": 1} if "num_attention_heads" in fields else {}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | sizes | fields))
        overrides += ["~warm_start", f"policy.model_name={tmp_path}", "policy.hf_config=null"]
        overrides += ["policy.tokenizer.name=x"]
    else:
        overrides += [
            "~warm_start",
            f"policy.hf_config.model_type={model_type}",
            "policy.hf_config.num_key_value_heads=1",
        ]
        overrides += ["+policy.hf_config_overrides={" + ", ".join(f"{name}: {fields[name]}" for name in fields) + "}"]
    if refused is None:
        load(CONFIGS / "grpo_tiny_cpu.yaml", overrides)
    else:
        assert f"{key}: is {number}, " in (error := error_of(*overrides))
        assert refused in error


def test_packed_rows_of_graphs_are_split_evenly(one_problem_of):
    overrides = [*CAPTURED_AND_PACKED, *TENSOR_PARALLEL, "policy.sequence_packing.train_mb_tokens=17"]
    one_problem_of(*overrides)


def test_packed_rows_may_be_shorter_than_the_longest_sample():
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        path = f"policy.sequence_packing.{key}"
        [note] = [note for note in load(CONFIGS / "grpo_tiny_cpu.yaml", [*PACKED, f"{path}=15"]).notes if path in note]
        assert "a sample of more than 15 tokens stops the run" in note


def test_rows_may_have_as_many_tokens_as_there_is_room_for():
    tokens = [f"policy.sequence_packing.{name}_mb_tokens=auto" for name in ("train", "logprob")]
    for parallel in ([], ["~warm_start", *TENSOR_PARALLEL]):
        load(CONFIGS / "grpo_tiny_cpu.yaml", [*PACKED, *parallel, *tokens])


def test_two_ranks_pass():
    for parallel in (TP, PP):
        load(CONFIGS / "grpo_tiny_cpu.yaml", ["~warm_start", f"{parallel}=2", "cluster.gpus_per_node=2"])
    load(CONFIGS / "grpo_tiny_cpu.yaml", ["~warm_start", "cluster.gpus_per_node=2"])


def test_uneven_stages_pass_where_the_recipe_says_how():
    overrides = ["~warm_start", f"{PP}=2", "cluster.gpus_per_node=2"]
    overrides += [f"{MEGATRON}.num_layers_in_first_pipeline_stage=1"]
    load(CONFIGS / "grpo_tiny_cpu.yaml", overrides)
    load(CONFIGS / "grpo_tiny_cpu.yaml", [*overrides, f"{MEGATRON}.num_layers_in_last_pipeline_stage=3"])


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (
            [
                *("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"),
                *("policy.megatron_cfg.tensor_model_parallel_size=2", "cluster.gpus_per_node=2"),
            ],
            "grpo.async_grpo.enabled is true on the policy's GPUs, with tensor parallelism",
        ),
        (
            ["policy.max_grad_norm=2.0", f"{MEGATRON}.optimizer.clip_grad=1.0"],
            "clip_grad 1.0 is the norm that gradients are clipped to",
        ),
        (
            ["checkpointing.enabled=false", "checkpointing.checkpoint_must_save_by='00:03:45:00'"],
            "checkpoint_must_save_by 00:03:45:00 ends the run without a checkpoint, since checkpointing.enabled is",
        ),
        (
            ["checkpointing.ft_save_period=2", "checkpointing.keep_top_k=null"],
            "checkpointing.ft_save_period is 2, and all of these checkpoints stay",
        ),
        (
            [f"++{MEGATRON}.freeze_config={{freeze_vision_model: true, freeze_language_model: false}}"],
            "freeze_config has no effect on a text-only model, as in NeMo-RL",
        ),
        (["checkpointing.save_period=7"], "checkpointing.save_period 7 is not a multiple of val_period (10)"),
    ],
)
def test_what_is_worth_saying_of_a_valid_recipe(overrides, note):
    assert note in "\n".join(load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).notes)


def test_metrics_are_those_that_the_algorithms_measure():
    algorithms = Path(nemo_offload_rl.__file__).parent / "algorithms"
    for name, spec in ALGORITHMS.items():
        logged = re.findall(r'"validation/(\w+)":', (algorithms / f"{name}.py").read_text())
        assert sorted(logged) == sorted(spec.validation_metrics)


def test_a_warm_start_has_no_time_limit(error_of, tmp_path):
    (tmp_path / "sft.yaml").write_text(
        f"defaults: {CONFIGS / 'sft_tiny_cpu.yaml'}\nsft: {{export_hf: true}}\n"
        "checkpointing: {checkpoint_must_save_by: 0:0:30:0}\n"
    )
    error = error_of(f"warm_start.recipe={tmp_path / 'sft.yaml'}")
    assert (
        "its checkpointing.checkpoint_must_save_by (0:0:30:0) must be null, since a warm start saves no checkpoints"
        in error
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:03:45:00", 13_500), ("1:0:0:1", 86_401), ("0:0:0:0", None), ("3:45:00", None), ("1:00:-1:0", None)],
)
def test_durations(text, seconds):
    assert duration_s(text) == seconds


DDP = f"{MEGATRON}.distributed_data_parallel_config"


@pytest.mark.parametrize(
    ("overrides", "path", "value", "line"),
    [
        (
            [f"{DDP}.overlap_param_gather=true", f"{DDP}.overlap_grad_reduce=false"],
            f"{DDP}.overlap_param_gather",
            False,
            f"{DDP}.overlap_param_gather is off, since {DDP}.overlap_grad_reduce is false",
        ),
        (
            [
                *("~warm_start", f"{TP}=2", "cluster.gpus_per_node=2", f"{MEGATRON}.sequence_parallel=true"),
                "policy.make_sequence_length_divisible_by=1",
            ],
            "policy.make_sequence_length_divisible_by",
            2,
            "policy.make_sequence_length_divisible_by is 2 instead of 1, since "
            "policy.megatron_cfg.sequence_parallel splits",
        ),
        (
            ["grpo.val_period=-1", "grpo.stop_at_validation_metric=null", "grpo.stop_at_validation_threshold=null"],
            "grpo.val_period",
            0,
            None,
        ),
        (
            ["policy.generation.backend=vllm", "+policy.generation.vllm_cfg.async_engine=true"],
            "policy.generation.vllm_cfg.async_engine",
            False,
            "policy.generation.vllm_cfg.async_engine is off: a step submits all its requests at once",
        ),
        (["policy.sequence_packing.algorithm=modified_ffd"], "policy.sequence_packing.algorithm", "modified_ffd", None),
        (["data.train.split_validation_size=null"], "data.train.split_validation_size", None, None),
    ],
)
def test_what_nemo_rl_runs_is_adapted_where_numbers_stay(overrides, path, value, line):
    validated = load(CONFIGS / "grpo_tiny_cpu.yaml", overrides)
    assert value_at(validated.config, path) == value
    said = [note for note in validated.notes if note.startswith(path)]
    assert [note[: len(line)] for note in said] == [line] if line else said == []


def test_an_adaptation_reads_a_key_only_where_it_has_no_problem(one_problem_of):
    error = one_problem_of(f"{DDP}.overlap_param_gather=7", f"{DDP}.overlap_grad_reduce=false")
    assert "overlap_param_gather: must be true or false; found 7" in error


# Rows of the tables of `rules.pairs`, at least one of each kind; the rows' keys are checked to exist above.
@pytest.mark.parametrize(
    "overrides",
    [
        ["++cluster.max_restarts=2", "checkpointing.enabled=false"],
        [
                f"{DDP}.overlap_param_gather=true",
                f"{DDP}.overlap_grad_reduce=true",
                f"{MEGATRON}.optimizer.use_distributed_optimizer=false",
            ],
        [
                f"{MEGATRON}.optimizer.use_precision_aware_optimizer=true",
                f"{MEGATRON}.optimizer.use_distributed_optimizer=false",
            ],
        [f"{MEGATRON}.delay_offload_until_cuda_graph=true", *offload("core_attn")],
        [f"{MEGATRON}.cuda_graph_impl=transformer_engine", f"{MEGATRON}.cuda_graph_modules=[mlp]"],
        [f"++{MEGATRON}.mlp_tile_tokens=auto", f"+{MEGATRON}.use_transformer_engine_op_fuser=true"],
        ["logger.wandb_enabled=true"],
        ["+cluster.master_port_range_low=2000"],
        ["++grpo.skip_reference_policy_logprobs_calculation=true", "loss_fn.reference_policy_kl_penalty=0.1"],
        ["loss_fn.sequence_level_importance_ratios=true"],
        ["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3.0", "loss_fn.force_on_policy_ratio=false"],
        ["loss_fn.disable_ppo_ratio=true", "loss_fn.force_on_policy_ratio=true"],
        [f"{TIS}_ratio=2.0"],
        [f"{TIS}_type=tis", f"{TIS}_ratio=2.0"],
        [f"{MEGATRON}.optimizer.min_lr=1"],
        [f"{MEGATRON}.scheduler.lr_warmup_iters=9", f"{MEGATRON}.scheduler.lr_decay_iters=9"],
        ["policy.generation.max_new_tokens=17"],
        ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.max_model_len=15"],
        ["grpo.advantage_clip_low=1.0", "grpo.advantage_clip_high=-1.0"],
        [CORRECTED, f"{TIS}_type=icepop", f"{TIS}_ratio=2.0", f"{TIS}_ratio_min=3.0"],
    ],
)  # fmt: skip
def test_a_key_that_another_one_contradicts_is_one_problem(overrides, one_problem_of):
    one_problem_of(*overrides)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ([f"{MEGATRON}.offload_modules=[core_attn]"], f"since {MEGATRON}.fine_grained_activation_offloading is false"),
        ([f"{MEGATRON}.cuda_graph_modules=[attn]"], f"since {MEGATRON}.cuda_graph_impl is 'none'"),
        ([f"{MEGATRON}.optimizer.optimizer_offload_fraction=0.5"], f"{MEGATRON}.optimizer.optimizer_cpu_offload is"),
        (
            ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.stop_properly_penalty_coef=0.5"],
            "overlong_buffer_penalty has no effect, since grpo.reward_shaping.stop_properly_penalty_coef is 0.5",
        ),
    ],
)
def test_a_key_that_another_one_switches_off_is_said(overrides, note):
    key = overrides[-1].partition("=")[0] if "shaping" not in overrides[0] else ""
    (said,) = (line for line in load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).notes if "has no effect" in line)
    assert said.startswith(f"{key} has no effect, since ") or not key
    assert note in said


def test_what_a_row_needs_is_accepted():
    """The values of each row that pass: for all rows of NEEDS at once, those that the exemplar's do not have."""
    for _, wanted, value, found in [("k", True, None, False), ("k", True, True, True), ("k", pairs.SET, 2, 3)]:
        assert pairs.needs("other", wanted, value, found) is None
    for how, value, bound in [("at most", 1, 1), ("below", 0, 1), ("at least", 1, 1), ("below", None, 1)]:
        assert pairs.bounds(how, "other", value, bound) is None
