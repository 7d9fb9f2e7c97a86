"""Holds the values of absent keys, and fills them in: the only place where a recipe's defaults are resolved."""

import copy
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.schema.value_types import is_import_path
from nemo_offload_rl.named_datasets import NAMED_DATASETS

# Full path of an optional key: its value if it is absent. A section comes before its keys.
IF_ABSENT: Mapping[str, Any] = {
    "policy.generation.colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
    "policy.generation.colocated.resources": {"gpus_per_node": None, "num_nodes": None},
    "policy.generation.colocated.resources.gpus_per_node": None,
    "policy.generation.colocated.resources.num_nodes": None,
    "policy.generation.stop_strings": None,
    "policy.generation.ignore_eos": False,
    "policy.generation.bad_words": None,
    "policy.generation.vllm_cfg.build_beside_policy": "auto",
    "policy.skip_model_check": False,
    "policy.unchecked_megatron_fields": False,
    "policy.trust_remote_code": False,
    "policy.max_grad_norm": None,
    "policy.sequence_packing": {"enabled": False},
    "policy.max_skipped_steps": 0,
    "policy.refit_buffer_size_gb": 1.0,
    "policy.verify_refit": False,
    "policy.logprob_chunk_size": None,
    "policy.megatron_cfg.use_fused_linear_logprobs": False,
    "policy.megatron_cfg.fused_linear_logprobs_chunk_size": 256,
    "policy.megatron_cfg.scheduler.override_opt_param_scheduler": True,
    "policy.megatron_cfg.moe_per_layer_logging": False,
    "policy.megatron_cfg.recompute_granularity": "full",
    "policy.megatron_cfg.recompute_modules": None,
    "policy.megatron_cfg.mlp_tile_tokens": None,
    "policy.megatron_cfg.fine_grained_activation_offloading": False,
    "policy.megatron_cfg.offload_modules": None,
    "policy.megatron_cfg.cuda_graph_impl": "none",
    "policy.megatron_cfg.cuda_graph_modules": [],
    "policy.megatron_cfg.cuda_graph_warmup_steps": 3,
    "policy.offload_optimizer_for_refit": None,
    "policy.use_pinned_optimizer_offload": True,
    "policy.residency": {},
    "policy.residency.verify": False,
    "policy.residency.huge_pages": True,
    "policy.residency.host_memory_limit_gib": None,
    "policy.residency.stream_window_mib": 512,
    "policy.residency.generation_weights": None,
    "policy.residency.table": None,
    "policy.activation_offload": {},
    "policy.activation_offload.strict": False,
    "policy.activation_offload.host_memory_limit_gib": None,
    "policy.numa": "auto",
    "policy.megatron_cfg.checkpoint": {
        "async_save": False,
        "ckpt_assume_constant_structure": False,
        "dist_ckpt_optim_fully_reshardable": False,
    },
    "policy.megatron_cfg.checkpoint.async_save": False,
    "policy.megatron_cfg.checkpoint.ckpt_assume_constant_structure": False,
    "policy.megatron_cfg.checkpoint.dist_ckpt_optim_fully_reshardable": False,
    "cluster.segment_size": None,
    "cluster.max_restarts": 0,
    "logger.monitor_gpus": False,
    "logger.num_val_samples_to_print": 0,
    "logger.gpu_monitoring": {"collection_interval": 10, "flush_interval": 10},
    "logger.gpu_monitoring.collection_interval": 10,
    "logger.gpu_monitoring.flush_interval": 10,
    "checkpointing.keep_top_k": None,
    "checkpointing.save_optimizer": True,
    "checkpointing.ft_save_period": None,
    "checkpointing.ft_keep_latest_k": None,
    "checkpointing.on_damaged": "error",
    "checkpointing.grace_period_s": None,
    "checkpointing.checkpoint_must_save_by": None,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k3",
    "loss_fn.kl_input_clamp_value": 20.0,
    "loss_fn.kl_output_clamp_value": 10.0,
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.ratio_clip_c": None,
    "loss_fn.token_level_loss": True,
    "loss_fn.use_importance_sampling_correction": False,
    "loss_fn.sequence_level_importance_ratios": False,
    "loss_fn.disable_ppo_ratio": False,
    "loss_fn.force_on_policy_ratio": False,
    "loss_fn.use_on_policy_kl_approximation": False,
    "loss_fn.use_cispo": False,
    "loss_fn.truncated_importance_sampling_type": None,
    "loss_fn.truncated_importance_sampling_ratio": None,
    "loss_fn.truncated_importance_sampling_ratio_min": None,
    "grpo.num_prompts_per_step": 32,
    "grpo.num_generations_per_prompt": 16,
    "grpo.max_num_steps": 1_000_000,
    "grpo.max_num_epochs": 1,
    "grpo.adv_estimator.name": "grpo",
    "grpo.adv_estimator.normalize_rewards": True,
    "grpo.adv_estimator.use_leave_one_out_baseline": True,
    "grpo.overlong_filtering": False,
    "grpo.seq_logprob_error_threshold": None,
    "grpo.skip_reference_policy_logprobs_calculation": False,
    "grpo.use_dynamic_sampling": False,
    "grpo.dynamic_sampling_max_gen_batches": 10,
    "grpo.val_period": 10,
    "grpo.val_at_start": False,
    "grpo.val_at_end": False,
    "grpo.max_val_samples": 256,
    "grpo.val_batch_size": 256,
    "grpo.seed": 42,
    "grpo.advantage_clip_low": None,
    "grpo.advantage_clip_high": None,
    "grpo.batch_multiplier": 1,
    "grpo.token_mult_prob_error_limit": None,
    "grpo.val_num_generations_per_prompt": 1,
    "grpo.reward_scaling.enabled": False,
    "grpo.reward_scaling.source_min": 0.0,
    "grpo.reward_scaling.source_max": 1.0,
    "grpo.reward_scaling.target_min": 0.0,
    "grpo.reward_scaling.target_max": 1.0,
    "grpo.reward_shaping.enabled": False,
    "grpo.reward_shaping.overlong_buffer_length": None,
    "grpo.reward_shaping.overlong_buffer_penalty": None,
    "grpo.reward_shaping.max_response_length": None,
    "grpo.reward_shaping.stop_properly_penalty_coef": None,
    "sft.max_num_steps": 60,
    "sft.max_num_epochs": 1,
    "sft.val_period": 10,
    "sft.val_at_start": True,
    "sft.val_at_end": False,
    "sft.val_batches": 8,
    "sft.val_global_batch_size": 32,
    "sft.val_micro_batch_size": 1,
    "sft.only_unmask_final": False,
    "sft.seed": 42,
    "dpo.max_num_steps": 150,
    "dpo.max_num_epochs": 1,
    "dpo.val_period": 25,
    "dpo.val_at_start": True,
    "dpo.val_at_end": False,
    "dpo.val_batches": 8,
    "dpo.val_global_batch_size": 8,
    "dpo.val_micro_batch_size": 1,
    "dpo.seed": 42,
    "dpo.reference_policy_kl_penalty": 0.05,
    "dpo.preference_loss_weight": 1.0,
    "dpo.sft_loss_weight": 0.0,
    "dpo.preference_average_log_probs": False,
    "dpo.sft_average_log_probs": False,
}

_SPECIAL_TOKENS = {"data.add_bos": True, "data.add_eos": True, "data.add_generation_prompt": False}

# The same for keys that only recipes of some algorithms have, by the algorithm's section.
IF_ABSENT_IN: Mapping[str, Mapping[str, Any]] = {"dpo": _SPECIAL_TOKENS, "sft": _SPECIAL_TOKENS}

# The same for keys of `data.train` and `data.validation`, and for further ones of `data.train`, by dataset_name.
IF_ABSENT_IN_DATASET: Mapping[str, Mapping[str, Any]] = {
    "ResponseDataset": {"input_key": "input", "output_key": "output"},
    "BinaryPreferenceDataset": {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"},
}
IF_ABSENT_IN_TRAINING: Mapping[str, Mapping[str, Any]] = {"ResponseDataset": {"seed": 42}}

# Keys of a dataset that `data.default` may hold for all datasets (nemo_rl/data/datasets/utils.py,
# `update_single_dataset_config`).
SHARED_DATASET_KEYS = (
    "dataset_name", "data_path", "split", "input_key", "output_key", "prompt_key", "chosen_key", "rejected_key",
)  # fmt: skip

# The names of NeMo-RL's environment for math, and its default verifier, where `env.NAME` has no reward of its own.
MATH_ENVIRONMENTS = ("math", "math_default")
MATH_VERIFY_IMPL = "hf_math_verify"

# The same for keys of `env.NAME` with a `math_verify_impl`, and with `reward: python`, whose function may keep a state,
# or ask a model.
IF_ABSENT_WITH_MATH_VERIFY: Mapping[str, Any] = {"num_workers": 8, "time_limit_s": 10.0}
IF_ABSENT_WITH_PYTHON: Mapping[str, Any] = {"num_workers": 1, "time_limit_s": 60.0}

# `policy.generation.vllm_kwargs.max_num_seqs` with vLLM: sequences that an engine runs at once, as many as vLLM
# captures CUDA graphs for. vLLM's own default, 256 or 1024, depends on the GPU, which the plan would have to know.
MAX_NUM_SEQS = 512

# Full path of a section that a recipe may write as `auto`: the keys that this sets to auto; the others get their values
# as absent keys.
AUTO_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "policy.residency": {"table": {"generate": {"params": "auto", "optimizer_state": "auto"}}}
}


def section_of_auto(path: str, value: Any) -> dict[str, Any] | None:
    """Returns the section that `auto` stands for; None for any other value, or if `auto` stands for no section here.

    Args:
        path: the section's full path.
        value: the recipe's value at this path.
    """
    if value != "auto" or path not in AUTO_SECTIONS:
        return None
    absent = {key.removeprefix(f"{path}."): value for key, value in IF_ABSENT.items() if key.rpartition(".")[0] == path}
    return copy.deepcopy({**absent, **AUTO_SECTIONS[path]})


def _if_absent_in_environment(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    if environment.get("math_verify_impl") is not None:
        return IF_ABSENT_WITH_MATH_VERIFY
    return IF_ABSENT_WITH_PYTHON if environment.get("reward") == "python" else {}


def share_dataset_keys(config: dict[str, Any]) -> dict[str, str]:
    """Moves the keys of datasets in `data.default` into the datasets that lack them, as NeMo-RL does.

    Args:
        config: a recipe's config, modified in place.

    Returns:
        The path in `data.default` of each moved key, by its path in a dataset.
    """
    data = config["data"] if isinstance(config.get("data"), dict) else {}
    default = data["default"] if isinstance(data.get("default"), dict) else {}
    shared = {key: default.pop(key) for key in SHARED_DATASET_KEYS if key in default}
    written_as = {}
    for role in ("train", "validation"):
        for path, section in datasets_of(data, role).items():
            for key in [key for key, value in shared.items() if value is not None and key not in section]:
                section[key] = copy.deepcopy(shared[key])
                written_as[f"{path}.{key}"] = f"data.default.{key}"
    return written_as


def resolve_absent_keys(config: dict[str, Any]) -> None:
    """Fills in the absent keys of the sections that a recipe has, and the sections that it writes as `auto`.

    Args:
        config: a recipe's config, modified in place.
    """
    data = config["data"] if "data" in config and isinstance(config["data"], dict) else {}
    if "default" in data and data["default"] is None:
        del data["default"]
    for role in ("train", "validation"):
        for dataset in datasets_of(data, role).values():
            _resolve_dataset(dataset, is_training=role == "train")
    _resolve_environments(config["env"] if isinstance(config.get("env"), dict) else {})
    _resolve_vllm(config)
    _resolve_advantages(config)
    own = [values for section, values in IF_ABSENT_IN.items() if section in config]
    for path, value in [pair for values in (IF_ABSENT, *own) for pair in values.items()]:
        section, _, name = path.rpartition(".")
        found: Any = config
        for part in section.split("."):
            found = found[part] if isinstance(found, dict) and part in found else None
        if isinstance(found, dict):
            found.setdefault(name, copy.deepcopy(value))
            of_auto = section_of_auto(path, found[name])
            found[name] = found[name] if of_auto is None else of_auto


def datasets_of(data: Mapping[str, Any], role: str) -> dict[str, dict[str, Any]]:
    """Returns the section of the training data, or the sections of the validation datasets, by their paths.

    Args:
        data: the section ``data`` of a recipe.
        role: the key in this section, ``train`` or ``validation``.
    """
    found, path = data[role] if role in data else None, f"data.{role}"
    sections = (
        {f"{path}.{number}": item for number, item in enumerate(found)} if isinstance(found, list) else {path: found}
    )
    return {path: section for path, section in sections.items() if isinstance(section, dict)}


def splits_validation_data(train: Mapping[str, Any]) -> bool:
    """Returns whether validation data is split off the training data, including by default.

    Args:
        train: the section ``data.train``.
    """
    named = NAMED_DATASETS.get(train["dataset_name"])
    if named is not None and named.validation_share is None:  # as in NeMo-RL
        return False
    if "split_validation_size" in train:
        return bool(train["split_validation_size"])
    return named is not None


def _resolve_environments(environments: Mapping[str, Any]) -> None:
    for name, environment in environments.items():
        if not isinstance(environment, dict):
            continue
        if name in MATH_ENVIRONMENTS and "reward" not in environment:
            environment.setdefault("math_verify_impl", MATH_VERIFY_IMPL)
        for key, value in _if_absent_in_environment(environment).items():
            environment.setdefault(key, value)


def _resolve_vllm(config: Mapping[str, Any]) -> None:
    policy = config["policy"] if isinstance(config.get("policy"), dict) else {}
    generation = policy["generation"] if isinstance(policy.get("generation"), dict) else {}
    if generation.get("backend") == "vllm" and isinstance(generation.get("vllm_kwargs") or {}, dict):
        generation["vllm_kwargs"] = {"max_num_seqs": MAX_NUM_SEQS, **(generation.get("vllm_kwargs") or {})}


def _resolve_advantages(config: Mapping[str, Any]) -> None:
    """Sets absent keys of `grpo` to those of `grpo.adv_estimator`, which are the ones that NeMo-RL reads."""
    section = config["grpo"] if isinstance(config.get("grpo"), dict) else {}
    estimator = section["adv_estimator"] if isinstance(section.get("adv_estimator"), dict) else {}
    for name in ("normalize_rewards", "use_leave_one_out_baseline"):
        section.setdefault(name, estimator[name] if name in estimator else IF_ABSENT[f"grpo.adv_estimator.{name}"])


def _resolve_dataset(section: dict[str, Any], *, is_training: bool) -> None:
    name = section["dataset_name"] if "dataset_name" in section else None
    if not isinstance(name, str) or is_import_path(name):  # a class has its own defaults
        return
    values: dict[str, Any] = {"split_validation_size": 0} if is_training else {}
    if name in NAMED_DATASETS:
        dataset = NAMED_DATASETS[name]
        values |= dataset.if_absent | (dataset.if_absent_in_training if is_training else {})
    for table in (IF_ABSENT_IN_DATASET, *((IF_ABSENT_IN_TRAINING,) if is_training else ())):
        if name in table:
            values |= table[name]
    for key, value in values.items():
        section.setdefault(key, value)
