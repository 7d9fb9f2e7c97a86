"""NeMo-RL's keys that belong to features this package lacks.

Their recipes load here: a key of such a feature is accepted where its value means "off", refused where it turns
something on, and never silently ignored. The three tables below are the whole of it; to add a feature, take its
rows out. `split.py` beside this file reads them.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OffOnly:
    """Names a key that may only have the values that leave its feature off."""

    path: str
    off: tuple[Any, ...]
    feature: str
    remedy: str = "leave it at {off} or delete the key"


@dataclass(frozen=True)
class SwitchedOff:
    """Names a section whose feature is off: its switch may only say so, and its other keys then mean nothing."""

    section: str
    switch: str
    off: tuple[Any, ...]
    feature: str
    keys: tuple[str, ...]  # an entry stands for everything below it too
    remedy: str = "set it to {off} or delete the section"


@dataclass(frozen=True)
class WithoutEffect:
    """Names a key that is accepted with any value, since here there is nothing that it could change.

    Attributes:
        reason: why; printed as a note unless `silent`.
        silent: for keys that only tune a part which is not in use.
        unless: a key and the value with which the part is in use; the schema then has its keys.
    """

    path: str
    reason: str
    silent: bool = False
    unless: tuple[str, Any] | None = None


_FALSE = (False, None)
_NULL = (None,)
_KEYS_OF_DATASETS = (
    "chosen_key",
    "data_path",
    "dataset_name",
    "input_key",
    "output_key",
    "prompt_key",
    "rejected_key",
    "split",
    "subset",
)
_KEY_OF_EACH = "write it into data.train and data.validation"
_IN_DEFAULT = "write it into data.default, or into data.train and data.validation"

OFF_ONLY: tuple[OffOnly, ...] = (
    OffOnly("on_policy_distillation", _NULL, "on-policy distillation"),
    OffOnly(
        "checkpointing.save_consolidated",
        _FALSE,
        "saving in Hugging Face format while training",
        "run `nemo-offload-rl export CHECKPOINT FOLDER` afterwards",
    ),
    *(
        OffOnly(f"data.default.{key}", _NULL, f"one {key} for training and validation data", _KEY_OF_EACH)
        for key in _KEYS_OF_DATASETS
    ),
    OffOnly("data.dataset_name", _NULL, "a dataset_name of the section data itself", _KEY_OF_EACH),
    OffOnly("data.prompt_file", _NULL, "a prompt file of the section data itself", _IN_DEFAULT),
    OffOnly("data.system_prompt_file", _NULL, "a system prompt of the section data itself", _IN_DEFAULT),
    OffOnly("data.train.subset", _NULL, "a subset of a data set on the hub", "name its folder in data_path"),
    OffOnly("data.use_multiple_dataloader", _FALSE, "several data loaders at once"),
    OffOnly(
        "data.val_data_paths",
        _NULL,
        "metrics of their own for several validation sets",
        "list the sets in data.validation, which measures them as one",
    ),
    OffOnly("data.validation.subset", _NULL, "a subset of a data set on the hub", "name its folder in data_path"),
    OffOnly("grpo.invalid_tool_call_advantage", _NULL, "tool calls"),
    OffOnly("grpo.malformed_thinking_advantage", _NULL, "penalties for malformed thinking"),
    OffOnly("grpo.max_rollout_turns", (1, None), "multi-turn rollouts"),
    OffOnly("grpo.reward_shaping.mode", ("response_length", None), "reward shaping by the length of the reasoning"),
    OffOnly("grpo.seq_logprob_error_threshold", _NULL, "dropping sequences by their log-prob error"),
    OffOnly("grpo.val_start_at", (-1, None), "a later first validation"),
    OffOnly("logger.mlflow_enabled", _FALSE, "MLflow", "use tensorboard_enabled or wandb_enabled"),
    OffOnly("logger.swanlab_enabled", _FALSE, "SwanLab", "use tensorboard_enabled or wandb_enabled"),
    OffOnly("logger.wandb.log_nemo_gym_full_result_tables", _FALSE, "NeMo Gym"),
    OffOnly("loss_fn.positive_example_nll_weight", (0, None), "the added likelihood loss of correct answers"),
    OffOnly("loss_fn.use_cispo", _FALSE, "CISPO"),
    OffOnly(
        "loss_fn.use_kl_in_reward", _FALSE, "the KL penalty as part of the reward", "use reference_policy_kl_penalty"
    ),
    OffOnly(
        "policy.megatron_cfg.model_overrides", ({}, None), "model_overrides", "write its keys into policy.megatron_cfg"
    ),
    OffOnly("policy.megatron_cfg.use_gloo_process_groups", _FALSE, "a second set of gloo process groups"),
    OffOnly("policy.router_replay.enabled", _FALSE, "router replay"),
    OffOnly("policy.sequence_packing.microbatch_order", ("packer", None), "another order of packed micro-batches"),
    OffOnly("policy.tokenizer.use_fastokens", _FALSE, "fastokens"),
    OffOnly("reward_penalties.penalize_duplicated_reasoning", _FALSE, "reward penalties"),
    OffOnly("reward_penalties.penalize_empty_final_answer", _FALSE, "reward penalties"),
    OffOnly("reward_penalties.penalize_malformed_think_tag", _FALSE, "reward penalties"),
    OffOnly("reward_penalties.penalize_unwanted_tokens", _FALSE, "reward penalties"),
    OffOnly("reward_penalties.token_ids", _NULL, "reward penalties"),
    OffOnly("sft.only_unmask_final", _FALSE, "training on the last turn alone"),
)

_LORA_KEYS = (
    "a2a_experimental",
    "alpha",
    "dim",
    "dropout",
    "dropout_position",
    "exclude_modules",
    "lora_A_init",
    "lora_A_init_method",
    "lora_B_init_method",
    "lora_dtype",
    "match_all_linear",
    "target_modules",
    "use_triton",
)

SWITCHED_OFF: tuple[SwitchedOff, ...] = (
    SwitchedOff(
        "data_plane",
        "enabled",
        _FALSE,
        "the data plane",
        (
            "backend",
            "claim_meta_poll_interval_s",
            "global_segment_size",
            "impl",
            "local_buffer_size",
            "num_storage_units",
            "storage_capacity",
        ),
    ),
    SwitchedOff(
        "grpo.async_grpo",
        "enabled",
        _FALSE,
        "asynchronous GRPO",
        (
            "in_flight_weight_updates",
            "max_generation_failures",
            "max_trajectory_age_steps",
            "recompute_kv_cache_after_weight_updates",
        ),
    ),
    SwitchedOff(
        "policy.draft",
        "enabled",
        _FALSE,
        "draft models",
        ("aux_layer_indices", "loss_weight", "model_name", "num_layers"),
    ),
    SwitchedOff(
        "policy.dtensor_cfg",
        "enabled",
        _FALSE,
        "the DTensor policy",
        (
            "_v2",
            "activation_checkpointing",
            "automodel_kwargs",
            "clear_cache_every_n_steps",
            "context_parallel_size",
            "cpu_offload",
            "custom_parallel_plan",
            "dp_replicate_size",
            "env_vars",
            "expert_parallel_size",
            "lora_cfg.enabled",
            *(f"lora_cfg.{key}" for key in _LORA_KEYS),
            "sequence_parallel",
            "tensor_parallel_size",
        ),
        "set it to {off}; the Megatron policy is policy.megatron_cfg",
    ),
    SwitchedOff(
        "policy.dynamic_batching",
        "enabled",
        _FALSE,
        "dynamic batching",
        ("logprob_mb_tokens", "sequence_length_round", "train_mb_tokens"),
        "set it to {off}; sequence_packing does its work",
    ),
    SwitchedOff("policy.megatron_cfg.fp8_cfg", "enabled", _FALSE, "fp8", ("fp8", "fp8_param", "fp8_recipe")),
    SwitchedOff("policy.megatron_cfg.peft", "enabled", _FALSE, "LoRA", _LORA_KEYS),
)

_VLLM = "tunes the vLLM backend; read with policy.generation.backend: vllm alone"
_VLLM_IN_USE = ("policy.generation.backend", "vllm")
_VLLM_SERVERS = "is for vLLM's asynchronous engine or its servers, which are not in use"
_KEYS_OF_VLLM_SERVERS = ("enable_vllm_metrics_logger", "http_refit_api_key_env_var", "vllm_metrics_logger_interval")
_MCORE_GENERATION = "tunes generation with Megatron, which is not in use"
_TRANSPORTS = "tunes NeMo-RL's refit transports, which are not in use"
_DTENSOR_ONLY = "only the DTensor policy reads it; Megatron's is policy.megatron_cfg.{0}"

WITHOUT_EFFECT: tuple[WithoutEffect, ...] = (
    WithoutEffect(
        "checkpointing.model_save_format", "is for the DTensor policy; Megatron's checkpoints have one format", True
    ),
    WithoutEffect(
        "data.default.processor", "prompts are built from prompt_file, system_prompt_file and the chat template"
    ),
    WithoutEffect("data.num_workers", "batches are prepared in the driver", True),
    WithoutEffect("grpo.adv_estimator.minus_baseline", "is read by other estimators than grpo", True),
    WithoutEffect(
        "grpo.reward_shaping.reasoning_length",
        "tunes reward shaping by the length of the reasoning, which is off",
        True,
    ),
    WithoutEffect("logger.mlflow", "tunes mlflow_enabled, which is off", True),
    WithoutEffect("logger.swanlab", "tunes swanlab_enabled, which is off", True),
    WithoutEffect("logger.tensorboard.log_dir", "TensorBoard files go into the run folder"),
    WithoutEffect("logger.tensorboard", "TensorBoard files go into the run folder", True),
    WithoutEffect("policy.generation.mcore_generation_config", _MCORE_GENERATION, True),
    WithoutEffect("policy.generation.port_range_high", "engines open no port to others", True),
    WithoutEffect("policy.generation.port_range_low", "engines open no port to others", True),
    WithoutEffect(
        "policy.generation.real_quant_export_cpu_offload", "tunes quantised rollouts, which are not in use", True
    ),
    WithoutEffect("policy.generation.refit_cfg", _TRANSPORTS, True),
    WithoutEffect("policy.generation.vllm_cfg", _VLLM, True, _VLLM_IN_USE),
    *(WithoutEffect(f"policy.generation.vllm_cfg.{key}", _VLLM_SERVERS, True) for key in _KEYS_OF_VLLM_SERVERS),
    WithoutEffect("policy.generation.vllm_cfg.use_tqdm", "engines have no terminal to draw a progress bar on", True),
    WithoutEffect("policy.generation.vllm_kwargs", _VLLM, True, _VLLM_IN_USE),
    WithoutEffect("policy.megatron_cfg.converter_type", "the model's own config names its architecture"),
    WithoutEffect(
        "policy.megatron_cfg.defer_fp32_logits",
        "logits are in policy.precision always; what is computed of them in float32 is computed in chunks of tokens",
        True,
    ),
    WithoutEffect(
        "policy.sequence_packing.fuse_loss",
        "the log-probs and the loss of a packed row are always computed at once",
        True,
    ),
    WithoutEffect(
        "policy.megatron_cfg.force_reconvert_from_hf", "weights are always read from the Hugging Face files", True
    ),
    WithoutEffect("policy.optimizer", _DTENSOR_ONLY.format("optimizer")),
    WithoutEffect("policy.scheduler", _DTENSOR_ONLY.format("scheduler")),
)

# Sections that hold nothing but keys of OFF_ONLY and WITHOUT_EFFECT.
UPSTREAM_SECTIONS = ("reward_penalties", "policy.router_replay")

# Values that NeMo-RL has for keys of ours, and this package has not.
OTHER_VALUES: dict[str, str] = {
    "policy.generation.backend": "set policy.generation.backend=vllm, or transformers",
    "policy.megatron_cfg.enabled": "set policy.megatron_cfg.enabled=true: Megatron is the one policy backend here",
    "policy.precision": "set policy.precision=bfloat16",
    "grpo.adv_estimator.name": "set grpo.adv_estimator.name=grpo",
    "policy.sequence_packing.algorithm": "set policy.sequence_packing.algorithm=modified_first_fit_decreasing",
}
# Data sets that NeMo-RL knows, and this package does not: what to do, by a dataset_name that the recipe may have.
OTHER_DATASETS: dict[str, str] = {
    "ResponseDataset": "give your data as a JSONL file (ResponseDataset) or a datasets folder (HFDataset)",
    "PreferenceDataset": "give your pairs as a JSONL file or a datasets folder whose rows have a prompt, a chosen and "
    "a rejected answer (BinaryPreferenceDataset) or ranked completions (PreferenceDataset)",
}
OTHER_ALGORITHMS: dict[str, str] = {
    "rm": "reward-model training",
    "distillation": "distillation",
    "ppo": "PPO",
}


def upstream_paths() -> tuple[str, ...]:
    """Every path that the tables name."""
    features = [f"{feature.section}.{key}" for feature in SWITCHED_OFF for key in (feature.switch, *feature.keys)]
    return (*(row.path for row in OFF_ONLY), *features, *(row.path for row in WITHOUT_EFFECT))
