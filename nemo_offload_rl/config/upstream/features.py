"""NeMo-RL's keys that belong to features this package lacks.

NeMo-RL's recipes load here: a key of such a feature is accepted if its value means "off", refused if it turns the
feature on, and never silently ignored. `split.py` reads the three tables below; to add a feature, delete its rows.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OffOnly:
    """Describes a key that may only have the values that leave its feature off.

    Attributes:
        off: these values, the usual one first.
        feature: the feature that any other value asks for.
        remedy: what to do instead; `{off}` is replaced by the usual value.
        only_if: a key and the value with which the row applies; with any other value, the row is skipped.
    """

    path: str
    off: tuple[Any, ...]
    feature: str
    remedy: str = "leave it at {off} or delete the key"
    only_if: tuple[str, Any] | None = None


@dataclass(frozen=True)
class SwitchedOff:
    """Describes a section whose feature must be off: its switch must say so, and its other keys have no effect."""

    section: str
    switch: str
    off: tuple[Any, ...]
    feature: str
    keys: tuple[str, ...]  # an entry includes everything below it
    remedy: str = "set it to {off} or delete the section"


@dataclass(frozen=True)
class WithoutEffect:
    """Describes a key that is accepted with any value, since it has nothing to change here.

    Attributes:
        reason: why the key has no effect; printed as a note unless `silent`.
        silent: set for keys that only tune a part which is not in use.
        unless: a key and the value with which the part is in use; the schema then checks the key.
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
_NO_SECTION: tuple[Any, ...] = ({}, None)
_NO_LIST: tuple[Any, ...] = ([], None)
_MEDIA = "images, video or sound in prompts"
_FROZEN = "a frozen part of the model"
_NO_MEDIA = "leave it at {off} or delete the key, and train on text alone"
_QUANTISED = "quantised weights"
_NOT_QUANTISED = "leave it at {off} or delete the key; weights have the dtype policy.precision"
_ALL_WEIGHTS = "leave it at {off} or delete the key; all weights are trained"
_VLLM_IN_USE = ("policy.generation.backend", "vllm")
_KEY_OF_EACH = "write it into data.train and data.validation"
_IN_DEFAULT = "write it into data.default, or into data.train and data.validation"

OFF_ONLY: tuple[OffOnly, ...] = (
    OffOnly(
        "async_rl", _NO_SECTION, "asynchronous GRPO by a single controller", "delete the section; steps are synchronous"
    ),
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
    OffOnly("data.dataset_name", _NULL, "dataset_name in the section data itself", _KEY_OF_EACH),
    OffOnly("data.prompt_file", _NULL, "a prompt file in the section data itself", _IN_DEFAULT),
    OffOnly("data.system_prompt_file", _NULL, "a system prompt in the section data itself", _IN_DEFAULT),
    OffOnly("data.train.subset", _NULL, "a subset of a dataset on the hub", "name its folder in data_path"),
    OffOnly("data.use_multiple_dataloader", _FALSE, "several data loaders at once"),
    OffOnly(
        "data.val_data_paths",
        _NULL,
        "a list of validation files with separate metrics",
        "list the datasets in data.validation, which measures them as one",
    ),
    OffOnly("data.validation.subset", _NULL, "a subset of a dataset on the hub", "name its folder in data_path"),
    OffOnly(
        "env.*.reward_functions",
        _NO_LIST,
        "a weighted sum of several reward functions",
        "write reward: python, and a reward_function that returns their weighted sum",
    ),
    OffOnly(
        "env.nemo_gym",
        _NO_SECTION,
        "NeMo Gym",
        "delete the section; your own environments can have any other name",
    ),
    OffOnly("env.*.verifier_type", ("math", None), "verifiers of multiple-choice answers"),
    OffOnly(
        "env.should_use_nemo_gym", _FALSE, "NeMo Gym", "set it to {off}; answers are judged by the environments of env"
    ),
    OffOnly("grpo.debug_payload_metrics", _FALSE, "metrics of the data sent between processes"),
    OffOnly("grpo.deduplicate_multimodal_data", _FALSE, f"sharing {_MEDIA}", _NO_MEDIA),
    OffOnly("grpo.invalid_tool_call_advantage", _NULL, "tool calls"),
    OffOnly("grpo.malformed_thinking_advantage", _NULL, "penalties for malformed thinking"),
    OffOnly("grpo.max_rollout_turns", (1, None), "multi-turn rollouts"),
    OffOnly(
        "grpo.num_val_generations_per_prompt",
        (1, None),
        "another name of grpo.val_num_generations_per_prompt",
        "write grpo.val_num_generations_per_prompt",
    ),
    OffOnly("grpo.reward_shaping.mode", ("response_length", None), "reward shaping by the length of the reasoning"),
    OffOnly("grpo.val_start_at", (-1, None), "delaying the first validation"),
    OffOnly("logger.mlflow_enabled", _FALSE, "MLflow", "use tensorboard_enabled or wandb_enabled"),
    OffOnly("logger.swanlab_enabled", _FALSE, "SwanLab", "use tensorboard_enabled or wandb_enabled"),
    OffOnly("logger.wandb.log_nemo_gym_full_result_tables", _FALSE, "NeMo Gym"),
    OffOnly("loss_fn.positive_example_nll_weight", (0, None), "an additional NLL loss on correct answers"),
    OffOnly(
        "loss_fn.use_kl_in_reward", _FALSE, "the KL penalty as part of the reward", "use reference_policy_kl_penalty"
    ),
    OffOnly("policy.generation.quant_cfg", _NULL, _QUANTISED, _NOT_QUANTISED),
    OffOnly("policy.generation.real_quant", _FALSE, _QUANTISED, _NOT_QUANTISED),
    OffOnly("policy.generation.vllm_cfg.enable_return_routed_experts", _FALSE, "router replay", only_if=_VLLM_IN_USE),
    OffOnly(
        "policy.generation.vllm_cfg.expose_http_server",
        _FALSE,
        "an HTTP server of the engine",
        "set it to {off} or delete the key; only the driver sends requests to engines",
        _VLLM_IN_USE,
    ),
    OffOnly("policy.generation.vllm_cfg.is_mx", _FALSE, _QUANTISED, _NOT_QUANTISED, _VLLM_IN_USE),
    OffOnly("policy.generation.vllm_cfg.limit_mm_per_prompt", _NO_SECTION, _MEDIA, _NO_MEDIA, _VLLM_IN_USE),
    OffOnly("policy.generation.vllm_cfg.video", _NO_SECTION, _MEDIA, _NO_MEDIA, _VLLM_IN_USE),
    OffOnly("policy.is_vlm", _FALSE, "a vision or audio model", "set policy.model_name to a text-only model"),
    OffOnly(
        "policy.megatron_cfg.clear_memory_caches_before_refit", _FALSE, "clearing Megatron's caches before a refit"
    ),
    *(
        OffOnly(f"policy.megatron_cfg.freeze_{part}", _FALSE, _FROZEN, _ALL_WEIGHTS)
        for part in ("sound_encoder", "sound_projection", "vision_model", "vision_projection")
    ),
    OffOnly("policy.megatron_cfg.radio_force_cpe_eval_mode", _FALSE, "a vision model", _NO_MEDIA),
    OffOnly("policy.megatron_cfg.use_gloo_process_groups", _FALSE, "Gloo process groups in addition to NCCL's"),
    OffOnly("policy.quant_cfg", _NULL, _QUANTISED, _NOT_QUANTISED),
    OffOnly("policy.router_replay.enabled", _FALSE, "router replay"),
    OffOnly("policy.tokenizer.audio", _NO_SECTION, _MEDIA, _NO_MEDIA),
    OffOnly("policy.tokenizer.video", _NO_SECTION, _MEDIA, _NO_MEDIA),
    OffOnly("policy.tokenizer.use_processor", _FALSE, _MEDIA, _NO_MEDIA),
    OffOnly("policy.tokenizer.use_fastokens", _FALSE, "fastokens"),
    OffOnly("reward_penalties.penalize_duplicated_reasoning", _FALSE, "reward penalties"),
    OffOnly("reward_penalties.penalize_empty_final_answer", _FALSE, "reward penalties"),
    OffOnly("reward_penalties.penalize_malformed_think_tag", _FALSE, "reward penalties"),
    OffOnly("reward_penalties.penalize_unwanted_tokens", _FALSE, "reward penalties"),
    OffOnly("reward_penalties.token_ids", _NULL, "reward penalties"),
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
_VLLM_SERVERS = "is for vLLM's asynchronous engine or its servers, which are not in use"
_KEYS_OF_VLLM_SERVERS = (
    "enable_vllm_metrics_logger",
    "http_refit_api_key_env_var",
    "http_server_serving_chat_kwargs",
    "reasoning_parser_plugin",
    "tool_parser_plugin",
    "vllm_metrics_logger_interval",
)
_QUANTISATION = "tunes quantised weights, which are not in use"
_KEYS_OF_QUANTISATION = (
    "policy.disable_modelopt_layer_spec",
    "policy.generation.real_quant_export_cpu_offload",
    "policy.generation.real_quant_ignore",
    "policy.generation.vllm_cfg.quantization_ignore_patterns",
    "policy.generation.vllm_cfg.quantization_ignored_layer_kws",
    "policy.quant_batch_size",
    "policy.quant_calib_data",
    "policy.quant_calib_size",
    "policy.quant_sequence_length",
)
_KEYS_OF_NEMO_GYM = ("should_log_nemo_gym_responses", "should_mask_flagged_samples")
_OTHER_BACKENDS = "tunes a backend of generation that this package lacks"
_KEYS_OF_OTHER_BACKENDS = ("dynamo_cfg", "sglang_cfg", "sglang_kwargs", "trtllm_cfg", "trtllm_kwargs")
_MCORE_GENERATION = "tunes generation with Megatron, which is not in use"
_TRANSPORTS = "tunes NeMo-RL's refit transports, which are not in use"
_DTENSOR_ONLY = "only the DTensor policy reads it; Megatron reads policy.megatron_cfg.{0}"

WITHOUT_EFFECT: tuple[WithoutEffect, ...] = (
    WithoutEffect(
        "checkpointing.model_save_format", "is for the DTensor policy; Megatron's checkpoints have one format", True
    ),
    WithoutEffect("data.num_workers", "batches are prepared in the driver", True),
    WithoutEffect("env.*.stop_strings", "NeMo-RL does not read it either; policy.generation.stop_strings ends answers"),
    *(WithoutEffect(f"env.{key}", "tunes NeMo Gym, which is not in use", True) for key in _KEYS_OF_NEMO_GYM),
    WithoutEffect("grpo.adv_estimator.minus_baseline", "is read by other estimators than grpo", True),
    WithoutEffect(
        "grpo.reward_shaping.reasoning_length",
        "tunes reward shaping by the length of the reasoning, which is off",
        True,
    ),
    WithoutEffect(
        "grpo.zero_variance_prompt_filtering",
        "NeMo-RL does not read it either; grpo.use_dynamic_sampling drops prompts whose rewards are all equal",
    ),
    WithoutEffect("logger.mlflow", "tunes mlflow_enabled, which is off", True),
    WithoutEffect("logger.swanlab", "tunes swanlab_enabled, which is off", True),
    WithoutEffect("logger.tensorboard.log_dir", "TensorBoard files go into the run folder"),
    WithoutEffect("logger.tensorboard", "TensorBoard files go into the run folder", True),
    WithoutEffect("policy.generation.mcore_generation_config", _MCORE_GENERATION, True),
    WithoutEffect("policy.generation.port_range_high", "engines open no port to others", True),
    WithoutEffect("policy.generation.port_range_low", "engines open no port to others", True),
    *(WithoutEffect(path, _QUANTISATION, True) for path in _KEYS_OF_QUANTISATION),
    *(WithoutEffect(f"policy.generation.{key}", _OTHER_BACKENDS, True) for key in _KEYS_OF_OTHER_BACKENDS),
    WithoutEffect("policy.generation.refit_cfg", _TRANSPORTS, True),
    WithoutEffect("policy.generation.vllm_cfg", _VLLM, True, _VLLM_IN_USE),
    WithoutEffect(
        "policy.generation.vllm_cfg.cap_max_tokens_to_context",
        "a prompt plus its answer never exceeds policy.max_total_sequence_length",
    ),
    WithoutEffect(
        "policy.generation.vllm_cfg.enable_expert_parallel",
        "NeMo-RL does not read it either; policy.generation.vllm_cfg.expert_parallel_size above 1 turns it on",
    ),
    WithoutEffect("policy.generation.vllm_cfg.refit_with_reload_api", _TRANSPORTS, True),
    *(WithoutEffect(f"policy.generation.vllm_cfg.{key}", _VLLM_SERVERS, True) for key in _KEYS_OF_VLLM_SERVERS),
    WithoutEffect("policy.generation.vllm_cfg.use_tqdm", "engines have no terminal to draw a progress bar on", True),
    WithoutEffect("policy.generation.vllm_kwargs", _VLLM, True, _VLLM_IN_USE),
    WithoutEffect("policy.megatron_cfg.converter_type", "the model's Hugging Face config determines its architecture"),
    WithoutEffect(
        "policy.megatron_cfg.defer_fp32_logits",
        "its memory saving is always on here: logits have the dtype policy.precision, and float32 values are computed "
        "from them in chunks of tokens",
    ),
    WithoutEffect(
        "policy.sequence_packing.fuse_loss",
        "its memory saving is always on here: log-probs and loss of a packed row are computed in one pass",
    ),
    WithoutEffect(
        "policy.megatron_cfg.force_reconvert_from_hf", "weights are always read from the Hugging Face files", True
    ),
    WithoutEffect(
        "policy.megatron_cfg.track_moe_metrics",
        "NeMo-RL does not read it either; the experts' auxiliary losses are logged wherever the recipe has them",
    ),
    WithoutEffect("policy.optimizer", _DTENSOR_ONLY.format("optimizer")),
    WithoutEffect("policy.scheduler", _DTENSOR_ONLY.format("scheduler")),
)

# Sections that contain only keys of OFF_ONLY and WITHOUT_EFFECT.
UPSTREAM_SECTIONS = ("reward_penalties", "policy.router_replay")
# Sections from which an algorithm reads further keys, or nothing at all; an empty one is a problem.
NEVER_EMPTY = ("policy.generation",)

# Key of this package: what to do about a value that only NeMo-RL supports.
OTHER_VALUES: dict[str, str] = {
    "data.default.processor": "prompts are built from prompt_file, system_prompt_file and the chat template; set "
    "data.default.processor to math_hf_data_processor (GRPO), sft_processor (SFT) or preference_preprocessor (DPO), or "
    "delete the key",
    "policy.generation.backend": "set policy.generation.backend=vllm, or transformers",
    "policy.generation.vllm_cfg.precision": "fp8 generation is missing: engines have the policy's unquantised weights; "
    "set policy.generation.vllm_cfg.precision=bfloat16, or float32",
    "policy.megatron_cfg.enabled": "set policy.megatron_cfg.enabled=true: Megatron is the only policy backend here",
    "policy.precision": "set policy.precision=bfloat16",
    "grpo.adv_estimator.name": "set grpo.adv_estimator.name=grpo",
    "policy.sequence_packing.algorithm": "set policy.sequence_packing.algorithm=modified_first_fit_decreasing",
}
# Supported dataset_name: what to write with it instead of a dataset that only NeMo-RL supports.
OTHER_DATASETS: dict[str, str] = {
    "ResponseDataset": "give your data as a JSONL file (ResponseDataset), a datasets folder (HFDataset) or a class "
    "(package.module.Class)",
    "PreferenceDataset": "give your pairs as a JSONL file or a datasets folder whose rows have a prompt, a chosen and "
    "a rejected answer (BinaryPreferenceDataset) or ranked completions (PreferenceDataset), or as a class "
    "(package.module.Class)",
}
# Keys that NeMo-RL's recipes for NeMo Gym set to null; with other environments NeMo-RL needs a number, too.
NULL_FOR_NEMO_GYM = ("data.max_input_seq_length", "grpo.max_val_samples", "grpo.val_batch_size")
OTHER_ALGORITHMS: dict[str, str] = {
    "rm": "reward-model training",
    "distillation": "distillation",
    "ppo": "PPO",
}


def accepted_paths() -> tuple[str, ...]:
    """Returns every path in the tables that is accepted with any value."""
    features = [f"{feature.section}.{key}" for feature in SWITCHED_OFF for key in feature.keys]
    return (*features, *(row.path for row in WITHOUT_EFFECT))


def upstream_paths() -> tuple[str, ...]:
    """Returns every path in the tables."""
    switches = [f"{feature.section}.{feature.switch}" for feature in SWITCHED_OFF]
    return (*(row.path for row in OFF_ONLY), *switches, *accepted_paths())
