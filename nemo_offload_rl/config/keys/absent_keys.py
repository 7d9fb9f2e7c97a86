"""Holds the values of absent keys, and fills them in: the only place where a recipe's defaults are resolved."""

import copy
from collections.abc import Mapping
from typing import Any

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
    "policy.max_skipped_steps": 0,
    "policy.refit_buffer_size_gb": 1.0,
    "policy.verify_refit": False,
    "policy.logprob_chunk_size": None,
    "policy.megatron_cfg.use_fused_linear_logprobs": False,
    "policy.megatron_cfg.fused_linear_logprobs_chunk_size": 256,
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
    "checkpointing.ft_save_period": None,
    "checkpointing.ft_keep_latest_k": None,
    "checkpointing.on_damaged": "error",
    "checkpointing.grace_period_s": None,
    "checkpointing.checkpoint_must_save_by": None,
    "data.train.split_validation_size": 0,
    "loss_fn.truncated_importance_sampling_type": None,
    "loss_fn.truncated_importance_sampling_ratio": None,
    "loss_fn.truncated_importance_sampling_ratio_min": None,
    "grpo.advantage_clip_low": None,
    "grpo.advantage_clip_high": None,
    "grpo.batch_multiplier": 1,
    "grpo.token_mult_prob_error_limit": None,
    "grpo.val_num_generations_per_prompt": 1,
    "grpo.reward_shaping.overlong_buffer_length": None,
    "grpo.reward_shaping.overlong_buffer_penalty": None,
    "grpo.reward_shaping.max_response_length": None,
    "grpo.reward_shaping.stop_properly_penalty_coef": None,
}

# The same for keys that are optional only in recipes of one algorithm, by the algorithm's section.
IF_ABSENT_IN: Mapping[str, Mapping[str, Any]] = {
    "dpo": {"data.add_bos": True, "data.add_eos": True, "data.add_generation_prompt": False},
}

# The same for keys of `env.NAME` with a `math_verify_impl`.
IF_ABSENT_WITH_MATH_VERIFY: Mapping[str, Any] = {"num_workers": 8, "time_limit_s": 10.0}

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


def resolve_absent_keys(config: dict[str, Any]) -> None:
    """Fills in the absent keys of the sections that a recipe has, and the sections that it writes as `auto`.

    Args:
        config: a recipe's config, modified in place.
    """
    data = config["data"] if "data" in config and isinstance(config["data"], dict) else {}
    for role in ("train", "validation"):
        for dataset in datasets_of(data, role).values():
            _resolve_named(dataset, is_training=role == "train")
    environments = config["env"].values() if isinstance(config.get("env"), dict) else ()
    for environment in environments:
        if isinstance(environment, dict) and environment.get("math_verify_impl") is not None:
            for name, value in IF_ABSENT_WITH_MATH_VERIFY.items():
                environment.setdefault(name, value)
    _resolve_vllm(config)
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


def _resolve_vllm(config: Mapping[str, Any]) -> None:
    policy = config["policy"] if isinstance(config.get("policy"), dict) else {}
    generation = policy["generation"] if isinstance(policy.get("generation"), dict) else {}
    if generation.get("backend") == "vllm" and isinstance(generation.get("vllm_kwargs") or {}, dict):
        generation["vllm_kwargs"] = {"max_num_seqs": MAX_NUM_SEQS, **(generation.get("vllm_kwargs") or {})}


def _resolve_named(section: dict[str, Any], *, is_training: bool) -> None:
    name = section["dataset_name"] if "dataset_name" in section else None
    if isinstance(name, str) and name in NAMED_DATASETS:
        dataset = NAMED_DATASETS[name]
        for key, value in (dataset.if_absent | (dataset.if_absent_in_training if is_training else {})).items():
            section.setdefault(key, value)
