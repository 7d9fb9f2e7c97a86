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
from tests.unit.config.conftest import CONFIGS, MEGATRON, each_of
from tests.unit.config.test_module_rules import CAPACITY, EXPERTS, capture, offload

TINY = CONFIGS / "grpo_tiny_cpu.yaml"
OPTIMIZER, DDP = f"{MEGATRON}.optimizer", f"{MEGATRON}.distributed_data_parallel_config"
TP = f"{MEGATRON}.tensor_model_parallel_size"
PP = f"{MEGATRON}.pipeline_model_parallel_size"
EP = f"{MEGATRON}.expert_model_parallel_size"
TWO = "cluster.gpus_per_node=2"
VIRTUAL_STAGES = f"~warm_start {PP}=2 {TWO} +{MEGATRON}.virtual_pipeline_model_parallel_size=2"
PACKED = "policy.sequence_packing.enabled=true"
CAPTURED_AND_PACKED = (
    f"{PACKED} policy.precision=bfloat16 {OPTIMIZER}.bf16=true {MEGATRON}.cuda_graph_impl=transformer_engine "
    f"{MEGATRON}.cuda_graph_modules=[moe_router] ~warm_start policy.hf_config.model_type=qwen3_moe "
    "+policy.hf_config.num_experts=4 +policy.hf_config.num_experts_per_tok=2"
)
SPLIT = f"{TP}=2 {TWO} {MEGATRON}.sequence_parallel=true"
TENSOR_PARALLEL = f"{SPLIT} policy.make_sequence_length_divisible_by=2"
TIS = "loss_fn.truncated_importance_sampling"
CORRECTED = "loss_fn.use_importance_sampling_correction=true"
TABLE = "policy.residency.table"
STREAMED = f"++{TABLE}.train.optimizer_state=streamed"
AHEAD = "grpo.async_grpo={enabled:true,max_trajectory_age_steps:0}"

GROUPS_OF_3 = f"+{MEGATRON}.microbatch_group_size_per_vp_stage=3"


def step_of(number, mbs=1):
    """Returns overrides for a training step of this many samples."""
    batch = f"policy.train_global_batch_size={number} policy.train_micro_batch_size={mbs}"
    return f"grpo.num_prompts_per_step=1 grpo.num_generations_per_prompt={number} {batch}"


# Of each rule what breaks it. Overrides of a key of SFT or DPO are for a recipe of that algorithm.
BROKEN = {
    "logprob_chunk_size": ["sft.seed=1 ++policy.logprob_chunk_size=64"],
    "parallel_world_size": [f"{TP}=2"],
    "cluster_segment_size": ["cluster.num_nodes=4 ++cluster.segment_size=3"],
    "virtual_pipeline_micro_batches": [
        f"{VIRTUAL_STAGES} policy.train_micro_batch_size=512",
        f"~warm_start {PP}=2 {TWO} +{MEGATRON}.virtual_pipeline_model_parallel_size=1",
        f"{VIRTUAL_STAGES} {step_of(6, mbs=2)}",
        f"{VIRTUAL_STAGES} {PACKED} {step_of(5)}",
        f"{VIRTUAL_STAGES} {GROUPS_OF_3} {step_of(4)}",
    ],
    "pipeline_layers": [f"{PP}=3 cluster.gpus_per_node=3"],
    "tensor_parallel_heads": [f"{TP}=8 cluster.gpus_per_node=8"],
    "expert_parallel_experts": [f"{EP}=2 {TWO}", f"{EXPERTS} {MEGATRON}.expert_tensor_parallel_size=2"],
    "sequence_parallel_experts": [f"{EXPERTS} {TENSOR_PARALLEL} {MEGATRON}.sequence_parallel=false"],
    "sequence_parallel_length": [f"{SPLIT} policy.make_sequence_length_divisible_by=3"],
    "moe_expert_capacity_factor": [f"{EXPERTS} {CAPACITY} {capture('attn', 'moe_router')} {offload('moe_act')}"],
    "batch_micro_batches": ["policy.train_micro_batch_size=100"],
    "dpo_loss_weights": ["dpo.preference_loss_weight=0.0 dpo.sft_loss_weight=0.0"],
    "dataset_default_keys": ["data.train={_override_:true,dataset_name:my_package.MyDataset,processor:mine}"],
    "packing_sizes": [
        f"{PACKED} ~policy.sequence_packing.logprob_mb_tokens",
        f"{PACKED} ++policy.sequence_packing.algorithm=modified_ffd",
        f"~warm_start {PACKED} {TENSOR_PARALLEL} policy.sequence_packing.sequence_length_round=3",
    ],
    "packing_row_sizes": [
        f"{CAPTURED_AND_PACKED} policy.sequence_packing.logprob_mb_tokens=auto",
        f"{CAPTURED_AND_PACKED} {TENSOR_PARALLEL} policy.sequence_packing.train_mb_tokens=17",
    ],
    "optimizer_bf16": ["policy.precision=bfloat16"],
    "optimizer_distributed": [f"{OPTIMIZER}.optimizer=sgd"],
    "optimizer_state_types": [f"+{OPTIMIZER}.exp_avg_dtype=bfloat16"],
    "cpu_optimizer_fraction": [f"{OPTIMIZER}.optimizer_cpu_offload=true"],
    "residency_table_cells": [
        f"+{TABLE}.train.grads=dropped",
        f"{TABLE}={{refit:{{optimizer_state:host}},generate:{{optimizer_state:auto}}}}",
        f"+{TABLE}.refit.params=keep",
    ],
    "residency_streamed_optimizer": [
        f"{STREAMED} {OPTIMIZER}.optimizer=sgd {OPTIMIZER}.use_distributed_optimizer=false",
        f"{STREAMED} {OPTIMIZER}.use_precision_aware_optimizer=true +{OPTIMIZER}.exp_avg_dtype=bfloat16",
        f"{STREAMED} {OPTIMIZER}.optimizer_cpu_offload=true {OPTIMIZER}.optimizer_offload_fraction=0.5",
        f"~policy.offload_optimizer_for_logprob "
        f"{TABLE}={{train:{{optimizer_state:streamed}},logprob:{{optimizer_state:gpu}}}}",
    ],
    "residency_generation_weights": ["+policy.residency.generation_weights=discard"],
    "residency_table_flags": [
        f"policy.offload_optimizer_for_refit=true +{TABLE}.generate.optimizer_state=keep",
        f"policy.offload_optimizer_for_logprob=true +{TABLE}.logprob.optimizer_state=gpu",
    ],
    "checkpoint_fully_reshardable": [f"+{MEGATRON}.checkpoint.dist_ckpt_optim_fully_reshardable=true"],
    "checkpoint_must_save_by": ["checkpointing.checkpoint_must_save_by='03:45:00'"],
    "grpo_step_samples": ["policy.train_global_batch_size=768"],
    "grpo_num_generations": ["grpo.num_generations_per_prompt=1 grpo.num_prompts_per_step=512"],
    "grpo_reward_shaping": ["grpo.reward_shaping.enabled=true grpo.reward_shaping.overlong_buffer_length=null"],
    "grpo_batch_multiplier": ["grpo.batch_multiplier=1.5"],
    "grpo_pass_k": ["grpo.stop_at_validation_metric=val:pass_k"],
    "grpo_async_replayed": [f"{AHEAD} grpo.debug.replay_rollouts=a"],
    "grpo_async_generation_weights": [
        f"{AHEAD} policy.generation.backend=vllm +policy.residency.generation_weights=host"
    ],
    "grpo_async_correction": [
        f"~warm_start policy.generation.colocated.enabled=false {TWO} grpo.async_grpo.enabled=true "
        "policy.generation.colocated.resources.gpus_per_node=1 loss_fn.use_importance_sampling_correction=false"
    ],
    "grpo_replay_rollouts": [
        "grpo.debug.replay_rollouts=a grpo.debug.save_rollouts=b",
        f"grpo.debug.replay_rollouts=a {TWO} policy.generation.colocated.enabled=false "
        "policy.generation.colocated.resources.gpus_per_node=1",
    ],
    "logger_profile": [
        f"{TWO} ++logger.profile={{steps:{values}}}"
        for values in ("[3,2]", "[1,2],trace:false", "[1,2],ranks:[0,2]", "[1]", "null")
    ],
    "grpo_adv_estimator": ["grpo.adv_estimator.normalize_rewards=false"],
    "loss_truncated_importance_sampling": [f"{CORRECTED} {TIS}_type=icepop {TIS}_ratio=2.0"],
    "loss_force_on_policy_ratio": ["loss_fn.force_on_policy_ratio=true policy.train_global_batch_size=256"],
    "dataset_split_seed": [
        "data.train={_override_:true,dataset_name:HFDataset,data_path:d,input_key:q,output_key:a,"
        "split_validation_size:0.1}"
    ],
    "dataset_keys": ["data.train={_override_:true,dataset_name:gsm8k,split:validation}"],
    "dataset_validation_split": ["+data.validation.split_validation_size=8"],
    "validation_data": ["data.validation=null", "sft.seed=1 data.validation=null"],
    "validation_printed_samples": ["sft.seed=1 ++logger.num_val_samples_to_print=2"],
    "validation_stop_target": [
        "grpo.stop_at_validation_metric=val:acc",
        *(f"sft.{key}" for key in ("stop_at_validation_metric=null", "val_period=0")),
        "sft.stop_at_validation_metric=val:accuracy",
    ],
    "checkpoint_metric": ["checkpointing.metric_name=val:val_loss"],
    "env_name": ["data.default.env_name=x", "~data.default.env_name"],
    "env_reward": ["+env.arithmetic.math_verify_impl=dapo_math_verify", "env.arithmetic.reward=python"],
    # torch's optimizers refuse most of these values; Transformer Engine's compute NaN, or train on silently.
    "optimizer values": [
        *(f"{OPTIMIZER}.{name}" for name in ("adam_beta1=1.0", "adam_beta2=1", "adam_beta1=-0.1", "adam_beta2=nan")),
        *(f"{OPTIMIZER}.{name}" for name in ("adam_eps=0", "lr=-1e-3", "lr=nan", "weight_decay=-1")),
        *(f"{OPTIMIZER}.{name}" for name in ("sgd_momentum=1.0", "clip_grad=nan")),
    ],
    # Rows of the tables of `rules.pairs`, at least one of each kind.
    "pairs": [
        "++cluster.max_restarts=2 checkpointing.enabled=false",
        f"{DDP}.overlap_param_gather=true {DDP}.overlap_grad_reduce=true {OPTIMIZER}.use_distributed_optimizer=false",
        f"{OPTIMIZER}.use_precision_aware_optimizer=true {OPTIMIZER}.use_distributed_optimizer=false",
        f"{MEGATRON}.delay_offload_until_cuda_graph=true {offload('core_attn')}",
        f"{MEGATRON}.cuda_graph_impl=transformer_engine {MEGATRON}.cuda_graph_modules=[mlp]",
        f"++{MEGATRON}.mlp_tile_tokens=auto +{MEGATRON}.use_transformer_engine_op_fuser=true",
        "logger.wandb_enabled=true",
        "+cluster.master_port_range_low=2000",
        "++grpo.skip_reference_policy_logprobs_calculation=true loss_fn.reference_policy_kl_penalty=0.1",
        "loss_fn.sequence_level_importance_ratios=true",
        "loss_fn.use_cispo=true loss_fn.ratio_clip_c=3.0 loss_fn.force_on_policy_ratio=false",
        "loss_fn.disable_ppo_ratio=true loss_fn.force_on_policy_ratio=true",
        f"{TIS}_ratio=2.0",
        f"{TIS}_type=tis {TIS}_ratio=2.0",
        f"{OPTIMIZER}.min_lr=1",
        f"{MEGATRON}.scheduler.lr_warmup_iters=9 {MEGATRON}.scheduler.lr_decay_iters=9",
        "policy.generation.max_new_tokens=17",
        "policy.generation.backend=vllm policy.generation.vllm_cfg.max_model_len=15",
        "grpo.advantage_clip_low=1.0 grpo.advantage_clip_high=-1.0",
        f"{CORRECTED} {TIS}_type=icepop {TIS}_ratio=2.0 {TIS}_ratio_min=3.0",
        # An adaptation reads a key only where it has no problem.
        f"{DDP}.overlap_param_gather=7 {DDP}.overlap_grad_reduce=false",
    ],
}


def test_each_rule_has_a_recipe_that_breaks_it():
    elsewhere = [topic.__name__ for topic in (model, modules, vllm)]  # in test files of their own
    functions = {rule.check for rule in RULES if hasattr(rule.check, "__name__")}
    names = {check.__name__ for check in functions if check.__module__ not in elsewhere}
    assert names <= BROKEN.keys()


@each_of(BROKEN)
def test_a_broken_rule_is_one_problem_with_its_key_and_remedy(overrides, error_of):
    [algorithm] = {key.partition(".")[0] for key in overrides} & {"sft", "dpo"} or {"grpo"}
    error_of(*overrides, recipe=CONFIGS / f"{algorithm}_tiny_cpu.yaml")


def test_what_torch_refuses_is_refused(error_of):
    for key, argument, value in (
        ("lr", "lr", -1e-3),
        ("lr", "lr", math.nan),
        ("adam_eps", "eps", -1e-8),
        ("weight_decay", "weight_decay", -0.1),
        ("adam_beta1", "betas", (1.0, 0.9)),
        ("adam_beta2", "betas", (0.9, 1.0)),
        ("adam_beta2", "betas", (0.9, -0.1)),
        ("sgd_momentum", "momentum", -0.1),
    ):
        kind = torch.optim.SGD if key == "sgd_momentum" else torch.optim.AdamW
        with pytest.raises(ValueError, match="Invalid"):
            kind([torch.zeros(1)], **{argument: value})
        error_of(f"{OPTIMIZER}.{key}={value[key.endswith('2')] if isinstance(value, tuple) else value}")


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
        f"{TABLE}=null",
        f"+{TABLE}.refit.optimizer_state=host",
        f"policy.offload_optimizer_for_refit=false +{TABLE}.generate.optimizer_state=keep",
        f"~policy.offload_optimizer_for_refit +{TABLE}.generate.optimizer_state=gpu",
        f"{TABLE}={{train:{{params:gpu}},generate:{{params:keep,grads:keep}}}} policy.numa=3",
        "~policy.residency ~policy.numa",
        # Rows may have as many tokens as there is room for.
        *(
            f"{PACKED} {parallel} policy.sequence_packing.train_mb_tokens=auto "
            "policy.sequence_packing.logprob_mb_tokens=auto"
            for parallel in ("", f"~warm_start {TENSOR_PARALLEL}")
        ),
        *(f"~warm_start {TWO} {parallel}" for parallel in ("", f"{TP}=2", f"{PP}=2")),
        f"{VIRTUAL_STAGES} {step_of(6)}",
        f"{VIRTUAL_STAGES} {PACKED} {step_of(6, mbs=2)}",
        f"{VIRTUAL_STAGES} {GROUPS_OF_3} {step_of(5)}",
        # Uneven stages, where the recipe says how.
        *(
            f"~warm_start {PP}=2 {TWO} {MEGATRON}.num_layers_in_first_pipeline_stage=1 {last}"
            for last in ("", f"{MEGATRON}.num_layers_in_last_pipeline_stage=3")
        ),
    ],
)
def test_what_contradicts_nothing_passes(overrides):
    load(TINY, overrides.split())


@pytest.mark.parametrize(
    ("ranks", "fields", "is_refused"),
    [
        (f"{PP}=3", {"num_hidden_layers": 6}, False),
        (f"{PP}=2", {"num_hidden_layers": 3}, True),
        (f"{TP}=3", {"num_attention_heads": 6}, False),
        (f"{TP}=2", {"num_attention_heads": 3}, True),
        (f"{EP}=3", {"num_experts": 6, "num_experts_per_tok": 2}, False),
        (f"{EP}=2", {"num_experts": 3, "num_experts_per_tok": 2}, True),
        (f"{EP}=2", {}, False),  # its default is known to transformers
    ],
)
@pytest.mark.parametrize("where", ["hf_config_overrides", "a folder"])
def test_a_models_sizes_are_read_wherever_they_are(ranks, fields, is_refused, where, tmp_path, error_of):
    key, number = ranks.split("=")
    overrides = [ranks, f"cluster.gpus_per_node={number}", "policy.train_global_batch_size=6", "~warm_start"]
    overrides += ["policy.train_micro_batch_size=1", "grpo.num_prompts_per_step=3", "grpo.num_generations_per_prompt=2"]
    model_type = "qwen3_moe" if key == EP else "qwen3"
    if where == "a folder":
        sizes = {"num_key_value_heads": 1} if "num_attention_heads" in fields else {}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | sizes | fields))
        overrides += [f"policy.model_name={tmp_path}", "policy.hf_config=null", "policy.tokenizer.name=x"]
    else:
        overrides += [f"policy.hf_config.model_type={model_type}", "policy.hf_config.num_key_value_heads=1"]
        overrides += ["+policy.hf_config_overrides={" + ", ".join(f"{name}: {fields[name]}" for name in fields) + "}"]
    if is_refused:
        error_of(*overrides)
    else:
        load(TINY, overrides)


def test_packed_rows_may_be_shorter_than_the_longest_sample():
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        path = f"policy.sequence_packing.{key}"
        [note] = [note for note in load(TINY, [PACKED, f"{path}=15"]).notes if path in note]
        assert "a sample of more than 15 tokens stops the run" in note


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (
            f"grpo.async_grpo.enabled=true {CORRECTED} {TP}=2 {TWO}",
            "grpo.async_grpo.enabled is true on the policy's GPUs, with tensor parallelism",
        ),
        (f"policy.max_grad_norm=2.0 {OPTIMIZER}.clip_grad=1.0", "clip_grad 1.0 is the norm that gradients are clipped"),
        (
            "checkpointing.enabled=false checkpointing.checkpoint_must_save_by='00:03:45:00'",
            "checkpoint_must_save_by 00:03:45:00 ends the run without a checkpoint, since checkpointing.enabled is",
        ),
        (
            "checkpointing.ft_save_period=2 checkpointing.keep_top_k=null",
            "checkpointing.ft_save_period is 2, and all of these checkpoints stay",
        ),
        (
            f"++{MEGATRON}.freeze_config={{freeze_vision_model:true,freeze_language_model:false}}",
            "freeze_config has no effect on a text-only model, as in NeMo-RL",
        ),
        ("checkpointing.save_period=7", "checkpointing.save_period 7 is not a multiple of val_period (10)"),
        # Keys that another one switches off.
        (
            f"{MEGATRON}.offload_modules=[core_attn]",
            f"{MEGATRON}.offload_modules has no effect, since {MEGATRON}.fine_grained_activation_offloading is false",
        ),
        (f"{MEGATRON}.cuda_graph_modules=[attn]", f"has no effect, since {MEGATRON}.cuda_graph_impl is 'none'"),
        (
            f"{OPTIMIZER}.optimizer_offload_fraction=0.5",
            f"optimizer_offload_fraction has no effect, since {OPTIMIZER}.optimizer_cpu_offload is",
        ),
        (
            "grpo.reward_shaping.enabled=true grpo.reward_shaping.stop_properly_penalty_coef=0.5",
            "overlong_buffer_penalty has no effect, since grpo.reward_shaping.stop_properly_penalty_coef is 0.5",
        ),
    ],
)
def test_what_is_worth_saying_of_a_valid_recipe(overrides, note):
    (said,) = (line for line in load(TINY, overrides.split()).notes if note in line)
    assert said.count("has no effect") <= 1


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
    error_of(f"warm_start.recipe={tmp_path / 'sft.yaml'}")


def test_durations():
    durations = {"00:03:45:00": 13_500, "1:0:0:1": 86_401, "0:0:0:0": None, "3:45:00": None, "1:00:-1:0": None}
    assert {text: duration_s(text) for text in durations} == durations


@pytest.mark.parametrize(
    ("overrides", "path", "value", "line"),
    [
        (
            f"{DDP}.overlap_param_gather=true {DDP}.overlap_grad_reduce=false",
            f"{DDP}.overlap_param_gather",
            False,
            f" is off, since {DDP}.overlap_grad_reduce is false",
        ),
        (
            f"~warm_start {SPLIT} policy.make_sequence_length_divisible_by=1",
            "policy.make_sequence_length_divisible_by",
            2,
            f" is 2 instead of 1, since {MEGATRON}.sequence_parallel splits",
        ),
        (
            "grpo.val_period=-1 grpo.stop_at_validation_metric=null grpo.stop_at_validation_threshold=null",
            "grpo.val_period",
            0,
            None,
        ),
        (
            "policy.generation.backend=vllm +policy.generation.vllm_cfg.async_engine=true",
            "policy.generation.vllm_cfg.async_engine",
            False,
            " is off: a step submits all its requests at once",
        ),
        ("policy.sequence_packing.algorithm=modified_ffd", "policy.sequence_packing.algorithm", "modified_ffd", None),
        ("data.train.split_validation_size=null", "data.train.split_validation_size", None, None),
    ],
)
def test_what_nemo_rl_runs_is_adapted_where_numbers_stay(overrides, path, value, line):
    validated = load(TINY, overrides.split())
    assert value_at(validated.config, path) == value
    said = [note.removeprefix(path) for note in validated.notes if note.startswith(path)]
    assert [note[: len(line or "")] for note in said] == [line] * (line is not None)


def test_what_a_row_needs_is_accepted():
    """The values of each row that pass: for all rows of NEEDS at once, those that the exemplar's do not have."""
    for _, wanted, value, found in [("k", True, None, False), ("k", True, True, True), ("k", pairs.SET, 2, 3)]:
        assert pairs.needs("other", wanted, value, found) is None
    for how, value, bound in [("at most", 1, 1), ("below", 0, 1), ("at least", 1, 1), ("below", None, 1)]:
        assert pairs.bounds(how, "other", value, bound) is None
