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
from nemo_offload_rl.config.installed.megatron_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.keys.schema_problems import value_at
from nemo_offload_rl.config.keys.tree import find_key
from nemo_offload_rl.config.rules import (
    NOTES,
    RULES,
    activations,
    architectures,
    batches,
    colocated,
    cpu_optimizer,
    experts,
    graphs,
    model,
    vllm,
)
from nemo_offload_rl.config.rules.base import SECTION, SPEC
from nemo_offload_rl.config.upstream.durations import duration_s
from tests.unit.config.conftest import CONFIGS

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
DIVISIBLE_BY_64 = "policy.make_sequence_length_divisible_by=64"
TENSOR_PARALLEL = [
    *(f"{TP}=2", "cluster.gpus_per_node=2", f"{MEGATRON}.sequence_parallel=true"),
    "policy.make_sequence_length_divisible_by=2",
]

BROKEN = {
    "chunks_are_of_log_prob_passes": (
        ["++policy.logprob_chunk_size=64"],
        "policy.logprob_chunk_size: is 64, but sft computes log-probs only in training; set it to null, and "
        f"{MEGATRON}.use_fused_linear_logprobs to true",
    ),
    "model_parallel_size_divides_world_size": (
        [f"{TP}=2"],
        f"{TP}: tensor 2 x pipeline 1 x context 1 = 2 ranks per replica do not divide the 1 ranks of the cluster",
    ),
    "segments_fill_the_nodes": (
        ["cluster.num_nodes=4", "++cluster.segment_size=3"],
        "cluster.segment_size: is 3, which does not divide cluster.num_nodes (4); make cluster.num_nodes a multiple",
    ),
    "restarts_need_checkpoints": (
        ["++cluster.max_restarts=2", "checkpointing.enabled=false"],
        "cluster.max_restarts: is 2, but checkpointing.enabled is false",
    ),
    "expert_parallel_size_divides_world_size": (
        [f"{EP}=3", "cluster.gpus_per_node=2"],
        f"{EP}: expert 3 x expert tensor 1 x pipeline 1 = 3 ranks do not divide the 2 ranks",
    ),
    "packed_tokens_are_not_gathered": (
        [
            f"{PP}=2",
            "cluster.gpus_per_node=2",
            "policy.sequence_packing.enabled=true",
            "policy.hf_config.model_type=qwen3_moe",
            "+policy.hf_config.num_experts=4",
            f"++{MEGATRON}.moe_token_dispatcher_type=allgather",
        ],
        f"moe_token_dispatcher_type: is allgather, which does not support packed rows on a pipeline ({PP} 2",
    ),
    "recomputed_experts_are_grouped": (
        [
            *(f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.recompute_granularity=selective"),
            f"{MEGATRON}.recompute_modules=[moe_act]",
        ],
        f"{MEGATRON}.recompute_modules: has moe_act, which only a mixture of experts has, and the model is dense",
    ),
    "recomputed_norms_return_no_residual": (
        [
            *(f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.recompute_granularity=selective"),
            *(f"{MEGATRON}.recompute_modules=[layernorm]", f"+{MEGATRON}.fused_residual_rmsnorm=true"),
        ],
        f"{MEGATRON}.fused_residual_rmsnorm: is true, but {MEGATRON}.recompute_modules holds layernorm, whose",
    ),
    "virtual_pipeline_needs_pipeline": (
        [f"+{MEGATRON}.virtual_pipeline_model_parallel_size=2"],
        f"virtual_pipeline_model_parallel_size: is 2, but {PP} is 1",
    ),
    "groups_of_micro_batches_fill_the_pipeline": (
        [*VIRTUAL_STAGES, f"+{MEGATRON}.microbatch_group_size_per_vp_stage=1"],
        f"microbatch_group_size_per_vp_stage: is 1, which is below {PP} (2); set it to null, or to 2 or more",
    ),
    "virtual_stages_train_whole_groups": (
        [*VIRTUAL_STAGES, "policy.train_micro_batch_size=512"],
        f"policy.train_global_batch_size: is 512, but with {MEGATRON}.virtual_pipeline_model_parallel_size 2 and {PP} "
        "2 a training step needs 2 micro-batches on each data-parallel rank; found 1: set it to 1024, or use no",
    ),
    "pipeline_stages_share_layers_evenly": (
        [f"{PP}=3", "cluster.gpus_per_node=3"],
        f"{PP}: is 3, but 4 of the model's 4 layers cannot be split evenly over 3 stages",
    ),
    "tensor_parallel_size_divides_heads": (
        [f"{TP}=8", "cluster.gpus_per_node=8"],
        f"{TP}: is 8, which does not divide the model's 4 attention heads",
    ),
    "expert_parallel_needs_experts": (
        [f"{EP}=2", "cluster.gpus_per_node=2"],
        f"{EP}: is 2, but policy.hf_config is a dense model; set it to 1",
    ),
    "sequence_parallel_needs_divisible_lengths": (
        [
            f"{TP}=2",
            "cluster.gpus_per_node=2",
            f"{MEGATRON}.sequence_parallel=true",
            "policy.make_sequence_length_divisible_by=3",
        ],
        "sequence_parallel: needs policy.max_total_sequence_length (16) to be a multiple of "
        "policy.make_sequence_length_divisible_by (6)",
    ),
    "port_range_has_both_ends": (
        ["+cluster.master_port_range_low=2000"],
        "cluster.master_port_range_low and master_port_range_high must be set together",
    ),
    "micro_batches_fill_global_batch": (
        ["policy.train_micro_batch_size=100"],
        "is 512, which is not a multiple of data-parallel size 1 x policy.train_micro_batch_size 100 = 100; "
        "change either",
    ),
    "micro_batches_fill_validation_batch": (
        ["sft.val_micro_batch_size=100"],
        "sft.val_global_batch_size: is 256, which is not a multiple of data-parallel size 1 x sft.val_micro_batch_size",
    ),
    "micro_batches_of_pairs_fill_validation_batch": (
        ["dpo.val_micro_batch_size=100"],
        "dpo.val_global_batch_size: is 256, which is not a multiple of data-parallel size 1 x dpo.val_micro_batch_size",
    ),
    "a_part_of_the_loss_counts": (
        ["dpo.preference_loss_weight=0.0", "dpo.sft_loss_weight=0.0"],
        "dpo.preference_loss_weight: is 0, and so is dpo.sft_loss_weight, so that the loss is always 0; set "
        "one of them above 0",
    ),
    "prompts_fit_into_sequences": (
        ["data.max_input_seq_length=17"],
        "data.max_input_seq_length: is 17, above policy.max_total_sequence_length (16)",
    ),
    "answers_fit_into_sequences": (
        ["policy.generation.max_new_tokens=17"],
        "policy.generation.max_new_tokens: is 17, above policy.max_total_sequence_length (16)",
    ),
    "keys_of_all_data_are_in_default": (
        ["data.train={_override_: true, dataset_name: my_package.MyDataset, processor: mine}"],
        "data.train.processor: is read from data.default alone; write data.default.processor instead",
    ),
    "packing_has_its_sizes": (
        ["policy.sequence_packing.enabled=true", "~policy.sequence_packing.logprob_mb_tokens"],
        "policy.sequence_packing.enabled: is true, which needs policy.sequence_packing.logprob_mb_tokens too",
    ),
    "packed_rows_beside_graphs_have_a_stated_size": (
        [*CAPTURED_AND_PACKED, "policy.sequence_packing.logprob_mb_tokens=auto"],
        f"policy.sequence_packing.logprob_mb_tokens: is auto, but with {MEGATRON}.cuda_graph_impl transformer_engine "
        "graphs keep GPU memory that the plan does not count; set it to a number of tokens",
    ),
    "packed_rows_are_split_evenly": (
        [*PACKED, *TENSOR_PARALLEL, "policy.sequence_packing.sequence_length_round=3"],
        f"policy.sequence_packing.sequence_length_round: must be a multiple of {TP} (2), over whose ranks sequence "
        "parallelism splits a row; found 3",
    ),
    "optimizer_agrees_with_precision": (
        ["policy.precision=bfloat16"],
        "optimizer.bf16: is false, but policy.precision is bfloat16; set it to true",
    ),
    "min_lr_is_below_lr": ([f"{MEGATRON}.optimizer.min_lr=1"], "optimizer.min_lr: is 1, above"),
    "warm_up_starts_below_lr": ([f"{MEGATRON}.scheduler.lr_warmup_init=1"], "lr_warmup_init: is 1, above"),
    "warm_up_ends_before_decay": (
        [f"{MEGATRON}.scheduler.lr_warmup_iters=9", f"{MEGATRON}.scheduler.lr_decay_iters=9"],
        "lr_warmup_iters: is 9, but must be below",
    ),
    "overlapped_gather_needs_distributed_optimizer": (
        [
            f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather=true",
            f"{MEGATRON}.distributed_data_parallel_config.overlap_grad_reduce=true",
            f"{MEGATRON}.optimizer.use_distributed_optimizer=false",
        ],
        f"overlap_param_gather: is true, which needs {MEGATRON}.optimizer.use_distributed_optimizer to be true",
    ),
    "precision_aware_optimizer_is_distributed_adam": (
        [f"{MEGATRON}.optimizer.use_precision_aware_optimizer=true", f"{MEGATRON}.optimizer.optimizer=sgd"],
        "use_precision_aware_optimizer: is true, which needs",
    ),
    "distributed_optimizer_is_adam": (
        [f"{MEGATRON}.optimizer.optimizer=sgd"],
        f"optimizer.optimizer: is sgd, which needs {MEGATRON}.optimizer.use_distributed_optimizer to be false",
    ),
    "first_moment_moves": (
        [f"{MEGATRON}.optimizer.adam_beta1=0.99999999"],
        "optimizer.adam_beta1: rounds to 1 in float32, in which Adam computes, so that the moment would stay "
        "0; set it to at most",
    ),
    "second_moment_moves": (
        [f"{MEGATRON}.optimizer.adam_beta2=0.99999999"],
        "optimizer.adam_beta2: rounds to 1 in float32, in which Adam computes",
    ),
    "adam_eps_is_not_lost": (
        [f"{MEGATRON}.optimizer.adam_eps=1e-50"],
        "optimizer.adam_eps: counts as 0 in float32, in which Adam computes, so that parameters with a "
        "gradient of 0 would become NaN",
    ),
    "decay_keeps_signs": (
        [f"{MEGATRON}.optimizer.lr=0.3", f"{MEGATRON}.scheduler.end_weight_decay=10"],
        f"optimizer.lr: is 0.3, and with {MEGATRON}.scheduler.end_weight_decay (10) lr x weight decay is above 1, so "
        "that each optimizer step would flip the sign of every weight",
    ),
    "decoupled_rates_descend": (
        [f"+{MEGATRON}.optimizer.decoupled_lr=-0.1"],
        "optimizer.decoupled_lr: must be above 0, or null for none; found -0.1",
    ),
    "some_norms_are_not_skipped": (
        [f"+{MEGATRON}.optimizer.grad_norm_skip_threshold=0"],
        "optimizer.grad_norm_skip_threshold: must be above 0; found 0",
    ),
    "types_of_state_need_precision_aware_optimizer": (
        [f"+{MEGATRON}.optimizer.exp_avg_dtype=bfloat16"],
        f"optimizer.exp_avg_dtype: must be float32 without {MEGATRON}.optimizer.use_precision_aware_optimizer; found "
        "bfloat16: set it to float32, or that to true",
    ),
    "recomputation_says_what": (
        [
            f"{MEGATRON}.activation_checkpointing=true",
            f"{MEGATRON}.recompute_granularity=selective",
            f"{MEGATRON}.recompute_modules=[attn]",
        ],
        "recompute_modules: may hold 'core_attn', 'moe_act',",
    ),
    "training_has_its_state_on_the_gpu": (
        ["+policy.residency.table.train.grads=dropped"],
        "policy.residency.table.train.grads: must be gpu, since a training step reads and writes it there; found "
        "'dropped'",
    ),
    "auto_only_in_generate": (
        ["policy.residency.table={refit: {optimizer_state: host}, generate: {optimizer_state: auto}}"],
        "policy.residency.table.generate.optimizer_state: is auto, which also decides "
        "policy.residency.table.refit.optimizer_state, but that is host; delete one of the two",
    ),
    "optimizer_state_is_streamed_in_training_alone": (
        [
            "~policy.offload_optimizer_for_logprob",
            "policy.residency.table={train: {optimizer_state: streamed}, logprob: {optimizer_state: gpu}}",
        ],
        "policy.residency.table.logprob.optimizer_state: is gpu, but policy.residency.table.train.optimizer_state is "
        "streamed, so that the GPU never holds all of it; set it to host or keep",
    ),
    "streamed_state_is_adams": (
        [
            "+policy.residency.table.train.optimizer_state=streamed",
            f"{MEGATRON}.optimizer.optimizer=sgd",
            f"{MEGATRON}.optimizer.use_distributed_optimizer=false",
        ],
        f"policy.residency.table.train.optimizer_state: is streamed, which needs {MEGATRON}.optimizer.optimizer adam",
    ),
    "state_is_streamed_or_stepped_on_the_cpu": (
        [
            "+policy.residency.table.train.optimizer_state=streamed",
            f"{MEGATRON}.optimizer.optimizer_cpu_offload=true",
            f"{MEGATRON}.optimizer.optimizer_offload_fraction=0.5",
        ],
        f"policy.residency.table.train.optimizer_state: is streamed, but {MEGATRON}.optimizer.optimizer_cpu_offload",
    ),
    "streamed_state_has_no_scales": (
        [
            "+policy.residency.table.train.optimizer_state=streamed",
            f"{MEGATRON}.optimizer.use_precision_aware_optimizer=true",
            f"+{MEGATRON}.optimizer.exp_avg_dtype=bfloat16",
        ],
        "exp_avg_dtype: must be float32 with policy.residency.table.train.optimizer_state streamed",
    ),
    "forward_passes_have_params_on_the_gpu": (
        ["+policy.residency.table.refit.params=keep"],
        "policy.residency.table.refit.params: must be gpu, since a refit sends them to generation; found 'keep'",
    ),
    "generation_weights_are_of_an_engine_that_shares_gpus": (
        ["+policy.residency.generation_weights=discard"],
        "policy.residency.generation_weights: must be host or null with policy.generation.backend transformers, which",
    ),
    "table_agrees_with_offload_for_refit": (
        ["policy.offload_optimizer_for_refit=true", "+policy.residency.table.generate.optimizer_state=keep"],
        "policy.residency.table.generate.optimizer_state: is keep, but policy.offload_optimizer_for_refit is true, "
        "which makes this cell host; delete one of the two, or make them agree (policy.offload_optimizer_for_refit is "
        "written at command line: policy.offload_optimizer_for_refit=true)",
    ),
    "table_agrees_with_offload_for_logprob": (
        ["policy.offload_optimizer_for_logprob=true", "+policy.residency.table.logprob.optimizer_state=gpu"],
        "policy.residency.table.logprob.optimizer_state: is gpu, but policy.offload_optimizer_for_logprob is true, "
        "which makes this cell host; delete one of the two, or make them agree (policy.offload_optimizer_for_logprob "
        "is written at command line: policy.offload_optimizer_for_logprob=true)",
    ),
    "fully_reshardable_checkpoints_are_refused": (
        [f"+{MEGATRON}.checkpoint.dist_ckpt_optim_fully_reshardable=true"],
        "restores wrong optimizer state from fully_reshardable checkpoints",
    ),
    "packing_has_an_algorithm": (
        [
            *("policy.sequence_packing.enabled=true", "++policy.sequence_packing.algorithm=modified_ffd"),
            *("++policy.sequence_packing.train_mb_tokens=64", "++policy.sequence_packing.logprob_mb_tokens=64"),
        ],
        "algorithm: is modified_ffd, which NeMo-RL's packer does not support, either; set it to "
        "modified_first_fit_decr",
    ),
    "time_limits_are_durations": (
        ["checkpointing.checkpoint_must_save_by='03:45:00'"],
        "checkpointing.checkpoint_must_save_by: must be days:hours:minutes:seconds above 0, such as '00:03:45:00'; "
        "found '03:45:00'",
    ),
    "global_batches_fill_step": (
        ["policy.train_global_batch_size=768"],
        "grpo.num_prompts_per_step: 64 prompts x grpo.num_generations_per_prompt 8 = 512 samples are not a multiple of",
    ),
    "groups_have_two_answers": (
        ["grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=512"],
        "grpo.num_generations_per_prompt: must be 2 or more, since an answer's advantage compares its reward with "
        "those of the other answers to the same prompt",
    ),
    "reward_shaping_has_its_numbers": (
        ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=null"],
        "grpo.reward_shaping.enabled: is true, which needs overlong_buffer_length, or stop_properly_penalty_coef",
    ),
    "larger_batches_need_dynamic_sampling": (
        ["grpo.batch_multiplier=1.5"],
        "grpo.batch_multiplier: is 1.5, which needs grpo.use_dynamic_sampling true; set it to 1",
    ),
    "pass_k_needs_several_answers": (
        ["grpo.stop_at_validation_metric=val:pass_k"],
        "grpo.val_num_generations_per_prompt: must be 2 or more for val:pass_k to be measured; found 1",
    ),
    "splits_have_a_seed": (
        [
            "data.train={_override_: true, dataset_name: HFDataset, data_path: d, input_key: q, output_key: a,"
            " split_validation_size: 0.1}"
        ],
        "data.train.split_validation_size: is 0.1, which needs data.train.seed, so that resumed runs split the data in "
        "the same way; set that",
    ),
    "named_datasets_have_the_keys_that_they_read": (
        ["data.train={_override_: true, dataset_name: gsm8k, split: validation}"],
        "data.train.split: must be 'train' or 'test' for gsm8k; found validation",
    ),
    "splits_are_shares_or_counts": (
        ["data.train.split_validation_size=8.0"],
        "data.train.split_validation_size: is 8.0, but must be a share below 1, or a number of samples, "
        "written without",
    ),
    "validation_data_is_not_split": (
        ["+data.validation.split_validation_size=8"],
        "data.validation.split_validation_size: is 8, but only data.train is split; delete it",
    ),
    "truncation_has_its_bounds": (
        ["loss_fn.truncated_importance_sampling_type=tis", "loss_fn.truncated_importance_sampling_ratio=2.0"],
        "loss_fn.truncated_importance_sampling_type: is tis, which needs loss_fn.use_importance_sampling_correction",
    ),
    "leave_one_out_needs_two_answers": (
        ["grpo.use_leave_one_out_baseline=true", "grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=512"],
        "grpo.use_leave_one_out_baseline: is true, which needs grpo.num_generations_per_prompt of 2 or more",
    ),
    "dynamic_sampling_needs_two_answers": (
        ["grpo.use_dynamic_sampling=true", "grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=512"],
        "grpo.use_dynamic_sampling: is true, which needs grpo.num_generations_per_prompt of 2 or more",
    ),
    "estimator_agrees_on_normalisation": (
        ["grpo.adv_estimator.normalize_rewards=false"],
        "grpo.adv_estimator.normalize_rewards: is false, but grpo.normalize_rewards is true",
    ),
    "estimator_agrees_on_baseline": (
        ["grpo.adv_estimator.use_leave_one_out_baseline=true"],
        "grpo.adv_estimator.use_leave_one_out_baseline: is true, but grpo.use_leave_one_out_baseline is false",
    ),
    "skipped_reference_is_not_needed": (
        ["++grpo.skip_reference_policy_logprobs_calculation=true", "loss_fn.reference_policy_kl_penalty=0.1"],
        "grpo.skip_reference_policy_logprobs_calculation: is true, which needs loss_fn.reference_policy_kl_penalty 0",
    ),
    "advantage_bounds_are_in_order": (
        ["grpo.advantage_clip_low=1.0", "grpo.advantage_clip_high=-1.0"],
        "grpo.advantage_clip_low: is 1.0, but must be below grpo.advantage_clip_high (-1.0)",
    ),
    "reward_scaling_has_its_ranges": (
        ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_min=2"],
        "grpo.reward_scaling.enabled: maps [2, 1.0] to [0.0, 1.0]",
    ),
    "sequence_ratios_need_sequence_loss": (
        ["loss_fn.sequence_level_importance_ratios=true"],
        "loss_fn.sequence_level_importance_ratios: is true, which needs loss_fn.token_level_loss false",
    ),
    "no_ratio_has_no_settings": (
        ["loss_fn.disable_ppo_ratio=true", "loss_fn.force_on_policy_ratio=true"],
        "loss_fn.disable_ppo_ratio: is true, so that loss_fn.force_on_policy_ratio has no ratio to apply to",
    ),
    "cispo_weights_tokens": (
        ["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3.0"],
        "use_cispo: is true, which needs loss_fn.ratio_clip_c null and loss_fn.force_on_policy_ratio false; set",
    ),
    "forced_ratio_needs_one_update": (
        ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=256"],
        "loss_fn.force_on_policy_ratio: is true, which needs one optimizer step per GRPO step",
    ),
    "validation_has_data": (["data.validation=null"], "data.validation: is null, but grpo.val_period is 10"),
    "answers_are_sampled_where_they_are_printed": (
        ["++logger.num_val_samples_to_print=2"],
        "logger.num_val_samples_to_print: is 2, but validation of sft samples no answers; set it to 0 or delete it",
    ),
    "stop_target_is_whole": (
        ["grpo.stop_at_validation_metric=val:acc"],
        "grpo.stop_at_validation_metric: must be 'val:accuracy',",
    ),
    "checkpoint_metric_is_measured": (
        ["checkpointing.metric_name=val:val_loss"],
        "must be 'val:accuracy', 'val:full_reward', 'val:num_unjudged_answers', 'val:mean_gen_tokens_per_sample' or "
        "'val:pass_k', train:NAME or",
    ),
    "wandb_has_its_names": (["logger.wandb_enabled=true"], "logger.wandb_enabled: is true, which needs logger.wandb"),
    "environment_is_defined": (
        ["data.default.env_name=x"],
        "data.default.env_name: names 'x', but env has 'arithmetic'",
    ),
    "environment_judges_in_one_way": (
        ["+env.arithmetic.math_verify_impl=dapo_math_verify"],
        "env.arithmetic.reward: is exact_match, but env.arithmetic.math_verify_impl judges answers, too; delete one of",
    ),
    "rewards_have_what_they_need": (
        ["env.arithmetic.reward=python", "+env.arithmetic.reward_function=rewards"],
        "env.arithmetic.reward_function: must be written package.module:function; found 'rewards'",
    ),
}


# Rules that no GRPO recipe breaks, though they read nothing of another section: the recipe that does.
OF_RECIPE = {"answers_are_sampled_where_they_are_printed": "sft", "chunks_are_of_log_prob_passes": "sft"}

# Topics that have a test file of their own.
OWN_FILE = (activations, architectures, colocated, cpu_optimizer, experts, graphs, model, vllm)
ELSEWHERE = tuple(topic.__name__ for topic in OWN_FILE)


@pytest.mark.parametrize(
    "rule",
    [rule for rule in RULES if rule.check.__module__ not in ELSEWHERE],
    ids=lambda rule: rule.check.__name__,
)
def test_a_broken_rule_is_one_problem_with_its_key_and_remedy(rule, error_of):
    overrides, message = BROKEN[rule.check.__name__]
    sections = {read.partition(".")[0] for read in rule.reads} & {"sft", "dpo"}
    algorithm = OF_RECIPE.get(rule.check.__name__, next(iter(sections), "grpo"))
    error = error_of(*overrides, recipe=CONFIGS / f"{algorithm}_tiny_cpu.yaml")
    assert message in error


TIS = "loss_fn.truncated_importance_sampling"
CORRECTED = "loss_fn.use_importance_sampling_correction=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.batch_multiplier=0.01", "grpo.use_dynamic_sampling=true"], "is less than one prompt; raise it"),
        ([f"{TIS}_ratio=2.0"], f"{TIS}_type: is null, but {TIS}_ratio is set; name a type"),
        (
            ["++cluster.max_restarts=2", "checkpointing.save_optimizer=false"],
            "cluster.max_restarts: is 2, but checkpointing.save_optimizer is false",
        ),
        ([f"{TIS}_ratio_min=0.5"], f"{TIS}_type: is null, but {TIS}_ratio_min is set; name a type"),
        ([CORRECTED, f"{TIS}_type=tis"], f"{TIS}_type: is tis, which needs {TIS}_ratio"),
        ([CORRECTED, f"{TIS}_type=icepop", f"{TIS}_ratio=2.0"], f"{TIS}_type: is icepop, which needs {TIS}_ratio_min"),
        (
            [CORRECTED, f"{TIS}_type=icepop", f"{TIS}_ratio=2.0", f"{TIS}_ratio_min=3.0"],
            f"{TIS}_ratio_min: is 3.0, above {TIS}_ratio (2.0)",
        ),
    ],
)
def test_other_ways_to_break_a_rule(overrides, message, error_of):
    assert message in error_of(*overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("adam_beta1=1.0", "optimizer.adam_beta1: must be below 1.0; found 1.0"),
        ("adam_beta2=1", "optimizer.adam_beta2: must be below 1.0; found 1"),
        ("adam_beta1=-0.1", "optimizer.adam_beta1: must be at least 0.0; found -0.1"),
        ("adam_beta2=nan", "optimizer.adam_beta2: must be"),
        ("adam_eps=0", "optimizer.adam_eps: must be above 0.0; found 0"),
        ("lr=-1e-3", "optimizer.lr: must be above 0.0; found -0.001"),
        ("lr=nan", "optimizer.lr: must be"),
        ("weight_decay=-1", "optimizer.weight_decay: must be at least 0.0; found -1"),
        ("sgd_momentum=1.0", "optimizer.sgd_momentum: must be below 1.0; found 1.0"),
        ("clip_grad=nan", "optimizer.clip_grad: must be"),
    ],
)
def test_values_that_no_optimizer_takes_are_refused(override, message, error_of):
    """torch's optimizers refuse most of them; Transformer Engine's compute NaN, or train on silently."""
    assert message in error_of(f"{MEGATRON}.optimizer.{override}")


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


@pytest.mark.parametrize("name", ["adam_beta1", "adam_beta2", "adam_eps"])
def test_an_override_of_adam_does_nothing_with_sgd(name, one_problem_of):
    sgd = [f"{MEGATRON}.optimizer.optimizer=sgd", f"{MEGATRON}.optimizer.use_distributed_optimizer=false"]
    error = one_problem_of(*sgd, f"{MEGATRON}.optimizer.{name}=0.5")
    assert f"optimizer.{name}: has no effect, since {MEGATRON}.optimizer.optimizer is 'sgd'; delete the over" in error
    notes = load(CONFIGS / "grpo_tiny_cpu.yaml", sgd).notes
    assert any("is sgd, with which adam_beta1, adam_beta2 and adam_eps have no effect" in note for note in notes)


def test_an_override_of_momentum_does_nothing_with_adam(one_problem_of, tmp_path):
    error = one_problem_of(f"{MEGATRON}.optimizer.sgd_momentum=0.5")
    assert f"optimizer.sgd_momentum: has no effect, since {MEGATRON}.optimizer.optimizer is 'adam'" in error
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"defaults: {CONFIGS / 'grpo_tiny_cpu.yaml'}\npolicy: {{megatron_cfg: {{optimizer: {{sgd_momentum: 0.5}}}}}}\n"
        f"warm_start: {{recipe: {CONFIGS / 'sft_tiny_cpu.yaml'}}}\n"
    )
    assert any("sgd_momentum 0.5 has no effect" in note for note in load(recipe).notes)


def test_recipes_keep_groups_whole():
    pairs = replace(ALGORITHMS["sft"], name="pairs", group_size=2)
    packing = (True, 96, None, 64, "modified_first_fit_decreasing", 64)
    assert batches.packing_has_its_sizes(*packing, ALGORITHMS["sft"]) is None
    assert "train_mb_tokens (96) to be at least 2 x policy.max_total_seq" in batches.packing_has_its_sizes(
        *packing, pairs
    )


def test_rules_read_keys_that_exist():
    for rule in [*RULES, *NOTES]:
        for read in rule.reads:
            path = read.removesuffix("?")
            section, _, name = path.rpartition(".")
            is_megatron = section in SECTIONS and name in megatron_fields(section)
            found = [find_key(spec.schema, path.replace(SECTION, spec.name)) for spec in ALGORITHMS.values()]
            assert is_megatron or read == SPEC or (all(found) if SECTION in path else any(found)), path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.validation=null"], "data.validation: is null, but sft.val_period is 10"),
        (["sft.stop_at_validation_metric=null"], "must be set together; set both or neither"),
        (["sft.val_period=0"], "needs validation during the run; set sft.val_period above 0"),
        (["sft.stop_at_validation_metric=val:accuracy"], "must be 'val:val_loss' or 'val:answer_probability'"),
    ],
)
def test_validation_needs_data_and_a_stop_target_metric_value_and_validation(overrides, message, error_of):
    assert message in error_of(*overrides, recipe=CONFIGS / "sft_tiny_cpu.yaml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["env.arithmetic.reward=python"],
            "env.arithmetic.reward: is python, which needs env.arithmetic.reward_function",
        ),
        (["+env.arithmetic.reward_function=a:b"], "env.arithmetic.reward_function: is read only with"),
        (["~data.default.env_name"], "data.default.env_name: missing; it names the section of env"),
    ],
)
def test_an_environment_is_whole(overrides, message, error_of):
    assert message in error_of(*overrides)


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
    message = f"policy.sequence_packing.train_mb_tokens: must be a multiple of {TP} (2), over whose ranks"
    assert message in one_problem_of(*overrides)


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
            ["policy.max_grad_norm=2.0", f"{MEGATRON}.optimizer.clip_grad=1.0"],
            "clip_grad 1.0 is the norm that gradients are clipped to",
        ),
        (
            ["policy.max_grad_norm=2.0", f"{MEGATRON}.optimizer.clip_grad=0"],
            "clip_grad 0 switches clipping off; policy.max_grad_norm (2.0) has an effect only where another key",
        ),
        (
            ["policy.train_global_batch_size=256", "loss_fn.force_on_policy_ratio=false"],
            "256 means 2 optimizer steps per GRPO step of 512 samples",
        ),
        (
            [f"{MEGATRON}.offload_modules=[core_attn]"],
            "offload_modules has no effect, since policy.megatron_cfg.fine_grained_activation_offloading is false",
        ),
        (
            [f"{MEGATRON}.cuda_graph_modules=[attn]"],
            "cuda_graph_modules has no effect, since policy.megatron_cfg.cuda_graph_impl is none",
        ),
        (
            [f"{MEGATRON}.delta_offload_bytes_across_pp_ranks=1048576"],
            "delta_offload_bytes_across_pp_ranks has no effect, since policy.megatron_cfg.pipeline_model_parallel_size",
        ),
        (
            [
                *("policy.precision=bfloat16", f"{MEGATRON}.optimizer.bf16=true"),
                *(f"{MEGATRON}.cuda_graph_impl=transformer_engine", f"{MEGATRON}.cuda_graph_modules=[mlp]"),
                *(f"{MEGATRON}.fine_grained_activation_offloading=true", f"{MEGATRON}.offload_modules=[core_attn]"),
                f"{MEGATRON}.delay_offload_until_cuda_graph=true",
            ],
            "delay_offload_until_cuda_graph has no effect on a dense model",
        ),
        (
            [
                *("~warm_start", "policy.hf_config.model_type=qwen3_moe", "+policy.hf_config.num_experts=8"),
                *("policy.precision=bfloat16", f"{MEGATRON}.optimizer.bf16=true"),
                *(f"{MEGATRON}.cuda_graph_impl=transformer_engine", f"{MEGATRON}.cuda_graph_modules=[moe_router]"),
                *(f"{MEGATRON}.fine_grained_activation_offloading=true", f"{MEGATRON}.offload_modules=[core_attn]"),
                f"{MEGATRON}.delay_offload_until_cuda_graph=true",
            ],
            "has no effect, since policy.megatron_cfg.offload_modules has neither expert_fc1 nor moe_act",
        ),
        (
            [f"{MEGATRON}.fine_grained_activation_offloading=true", f"{MEGATRON}.offload_modules=[core_attn]"],
            "attention_backend is not fused with policy.precision float32, so that attention saves its scores for the "
            "backward pass; the",
        ),
        (
            [
                *("policy.precision=bfloat16", f"{MEGATRON}.optimizer.bf16=true"),
                *(f"{MEGATRON}.fine_grained_activation_offloading=true", f"{MEGATRON}.offload_modules=[core_attn]"),
                f"+{MEGATRON}.attention_backend=unfused",
            ],
            "attention_backend is unfused, so that attention saves its scores for the backward pass; the host memory "
            "computed for",
        ),
        (
            [
                *(f"{MEGATRON}.fine_grained_activation_offloading=true", f"+{MEGATRON}.attention_backend=flash"),
                *(f"{MEGATRON}.offload_modules=[core_attn,attn_proj]", "policy.train_micro_batch_size=2"),
            ],
            "attention_backend is flash, so that attn_proj saves a copy of the attention output in micro-batches of 2 "
            "padded rows; the",
        ),
        (
            [
                *(f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.recompute_granularity=selective"),
                f"{MEGATRON}.recompute_modules=[core_attn,moe,shared_experts]",
            ],
            "recompute_modules has moe and shared_experts, which have no effect on a dense model",
        ),
        (
            [
                *(f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.recompute_granularity=selective"),
                f"{MEGATRON}.recompute_modules=[core_attn,moe]",
            ],
            "recompute_modules has moe, which has no effect on a dense model",
        ),
        (
            ["policy.activation_offload.strict=true"],
            "policy.activation_offload.strict has no effect, since policy.megatron_cfg.fine_grained_activation_offload",
        ),
        (
            [
                *("~warm_start", f"{PP}=2", "cluster.gpus_per_node=2"),
                f"{MEGATRON}.delta_offload_bytes_across_pp_ranks=1048576",
            ],
            "pp_ranks has no effect, since policy.megatron_cfg.fine_grained_activation_offloading is false",
        ),
        (
            ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.stop_properly_penalty_coef=0.5"],
            "stop_properly_penalty_coef 0.5 is the penalty in use; overlong_buffer_length, overlong_buffer_penalty, "
            "max_resp",
        ),
        (
            ["grpo.val_num_generations_per_prompt=4", "policy.generation.val_temperature=0.0"],
            "val_num_generations_per_prompt samples 4 equal answers to a problem, since policy.generation.val_temp",
        ),
        (
            [
                "data.validation={_override_: true, dataset_name: ResponseDataset, data_path: d, input_key: q,"
                " output_key: a, seed: 3}"
            ],
            "data.validation.seed has no effect, since ResponseDataset is read in order, from the first row",
        ),
        (
            ["checkpointing.enabled=false", "checkpointing.checkpoint_must_save_by='00:03:45:00'"],
            "checkpoint_must_save_by 00:03:45:00 ends the run without a checkpoint, since checkpointing.enabled is",
        ),
        (
            ["checkpointing.ft_save_period=2", "checkpointing.keep_top_k=null"],
            "checkpointing.ft_save_period is 2, and every one of these checkpoints is kept, since",
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


STREAMED = ["++policy.residency.table.train.optimizer_state=streamed"]
ASYNC = [f"++{MEGATRON}.checkpoint.async_save=true", "checkpointing.enabled=true"]
PAGEABLE = ["policy.use_pinned_optimizer_offload=false"]


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (
            STREAMED + ASYNC,
            f"{MEGATRON}.checkpoint.async_save",
            "is true, but policy.residency.table.train.optimizer_state is streamed, so that the next training step "
            "waits until a checkpoint's files are written",
        ),
        (
            STREAMED + PAGEABLE,
            "policy.use_pinned_optimizer_offload",
            "is false, but policy.residency.table.train.optimizer_state is streamed, so that each step copies all "
            "optimizer state from and to pageable host memory",
        ),
    ],
)
def test_what_slows_streamed_state_is_said_once(overrides, key, text):
    (said,) = (note for note in load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).notes if note.startswith(key))
    assert said.startswith(f"{key} {text}")


@pytest.mark.parametrize(
    "overrides",
    [
        STREAMED,
        ASYNC + PAGEABLE,
        [*STREAMED, *ASYNC, "checkpointing.enabled=false"],
        [*STREAMED, *ASYNC, "checkpointing.save_optimizer=false"],
    ],
)
def test_nothing_is_said_where_streamed_state_is_not_slowed(overrides):
    notes = load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).notes
    assert not any("streamed" in note for note in notes)


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
