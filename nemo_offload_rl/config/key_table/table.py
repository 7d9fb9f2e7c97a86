"""The table of what a key may be, with its rows about NeMo-RL's keys, and its reader.

Rows about NeMo-RL's keys: features that this package lacks, keys without an effect here, and further values. NeMo-RL's
recipes load here: a key of such a feature is accepted if its value means "off", refused if it turns the feature on, and
never silently ignored. To add a feature, delete its rows.
"""

from collections.abc import Iterator
from typing import Any

from nemo_offload_rl.config.key_table.megatron import MEGATRON_ROWS
from nemo_offload_rl.config.key_table.row import Kind, Row, each, matches


def _off(key: str, feature: str, values: tuple[Any, ...] = (False, None), remedy: str = "") -> Row:
    return Row(key, Kind.OFF_ONLY, f"this package does not support {feature}", values, remedy)


def _switched_off(section: str, feature: str, names: str, remedy: str = "set it to {off} or delete the section") -> Any:
    """Returns the rows of a section whose switch must be off, and whose other keys then have no effect."""
    return (
        _off(f"{section}.enabled", feature, remedy=remedy),
        *each(section, names, Kind.NOT_IN_USE, f"tunes {feature}, which is off"),
    )


_NULL = (None,)
_NO_SECTION: tuple[Any, ...] = ({}, None)
_MEDIA = "images, video or sound in prompts"
_NO_MEDIA = "leave it at {off} or delete the key, and train on text alone"
_QUANTISED = "quantised weights"
_NOT_QUANTISED = "leave it at {off} or delete the key; weights have the dtype policy.precision"
_ALL_WEIGHTS = "leave it at {off} or delete the key; all weights are trained"
_IN_DEFAULT = "write it into data.default, or into data.train and data.validation"
_LOGGERS = "use tensorboard_enabled or wandb_enabled"
_MEGATRON = "policy.megatron_cfg"
_VLLM = ("policy.generation.backend", "vllm")
_OTHER_BACKEND = "tunes the vLLM backend; read with policy.generation.backend: vllm alone"
_RUN_FOLDER = "TensorBoard files go into the run folder"
_QUANTISED_OFF = "tunes quantised weights, which are not in use"
_NOT_READ = "NeMo-RL does not read it either; "
_ALWAYS_ON = "its memory saving is always on here: "
_LORA = (
    "a2a_experimental alpha dim dropout dropout_position exclude_modules lora_A_init lora_A_init_method "
    "lora_B_init_method lora_dtype match_all_linear target_modules use_triton"
)

# Key of policy.generation.vllm_cfg: the only value that it may have, and what another one would turn on.
_VLLM_ONLY: dict[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (1, "pipeline parallelism in vLLM"),
    "load_format": ("dummy", "weights of an engine from elsewhere than the first refit"),
    "kv_cache_dtype": ("auto", "a quantised KV cache"),
    "skip_tokenizer_init": (True, "texts instead of token ids as an engine's prompts and answers"),
    "logprobs_mode": ("processed_logprobs", "log-probs of another distribution than the one that vLLM samples from"),
    "num_first_layers_in_bf16": (0, "fp8 generation"),
    "num_last_layers_in_bf16": (0, "fp8 generation"),
    "use_deep_gemm": (False, "fp8 generation"),
    "http_refit_server_port": (None, "refits over HTTP"),
    "zmq_refit_server_port": (None, "refits over ZeroMQ"),
    "reset_encoder_cache_after_weight_update": (False, "multimodal models"),
}

NEMO_RL_ROWS: tuple[Row, ...] = (
    # The rest of the vLLM backend's rows then find nothing.
    Row("policy.generation.vllm_cfg", Kind.NOT_IN_USE, _OTHER_BACKEND, unless=_VLLM),
    Row("policy.generation.vllm_kwargs", Kind.NOT_IN_USE, _OTHER_BACKEND, unless=_VLLM),
    _off("async_rl", "asynchronous GRPO by one controller", _NO_SECTION, "delete the section; see grpo.async_grpo"),
    _off("on_policy_distillation", "on-policy distillation", _NULL),
    _off(
        "checkpointing.save_consolidated",
        "saving in Hugging Face format while training",
        remedy="run `nemo-offload-rl export CHECKPOINT FOLDER` afterwards",
    ),
    _off("data.dataset_name", "dataset_name in the section data itself", _NULL, _IN_DEFAULT),
    _off("data.prompt_file", "a prompt file in the section data itself", _NULL, _IN_DEFAULT),
    *(
        _off(f"data.{part}.subset", "a subset of a dataset on the hub", _NULL, "name its folder in data_path")
        for part in ("default", "train", "validation")
    ),
    _off(
        "data.val_data_paths",
        "a list of validation files with separate metrics",
        _NULL,
        "list the datasets in data.validation, which measures them as one",
    ),
    _off("env.*.verifier_type", "verifiers of multiple-choice answers", ("math", None)),
    _off("data.use_multiple_dataloader", "several data loaders at once"),
    _off(
        "env.*.reward_functions",
        "a weighted sum of several reward functions",
        ([], None),
        "write reward: python, and a reward_function that returns their weighted sum",
    ),
    _off("env.nemo_gym", "NeMo Gym", _NO_SECTION, "delete the section; your own environments can have any other name"),
    _off("env.should_use_nemo_gym", "NeMo Gym", remedy="set it to {off}; the environments of env judge answers"),
    _off("grpo.debug_payload_metrics", "metrics of the data sent between processes"),
    _off("grpo.deduplicate_multimodal_data", f"sharing {_MEDIA}", remedy=_NO_MEDIA),
    _off("grpo.invalid_tool_call_advantage", "tool calls", _NULL),
    _off("grpo.malformed_thinking_advantage", "penalties for malformed thinking", _NULL),
    _off("grpo.max_rollout_turns", "multi-turn rollouts", (1, None)),
    _off(
        "grpo.num_val_generations_per_prompt",
        "another name of grpo.val_num_generations_per_prompt",
        (1, None),
        "write grpo.val_num_generations_per_prompt",
    ),
    _off("grpo.val_start_at", "delaying the first validation", (-1, None)),
    _off("logger.mlflow_enabled", "MLflow", remedy=_LOGGERS),
    _off("logger.swanlab_enabled", "SwanLab", remedy=_LOGGERS),
    _off("logger.wandb.log_nemo_gym_full_result_tables", "NeMo Gym"),
    _off("loss_fn.positive_example_nll_weight", "an additional NLL loss on correct answers", (0, None)),
    _off("loss_fn.use_kl_in_reward", "the KL penalty as part of the reward", remedy="use reference_policy_kl_penalty"),
    _off("policy.generation.quant_cfg", _QUANTISED, _NULL, _NOT_QUANTISED),
    _off("policy.generation.real_quant", _QUANTISED, remedy=_NOT_QUANTISED),
    *(_off(f"policy.generation.vllm_cfg.{name}", what, (only,)) for name, (only, what) in _VLLM_ONLY.items()),
    _off("policy.generation.vllm_cfg.expose_http_server", "requests to engines from elsewhere than the driver"),
    _off("policy.generation.vllm_cfg.is_mx", _QUANTISED, remedy=_NOT_QUANTISED),
    _off("policy.generation.vllm_cfg.limit_mm_per_prompt", _MEDIA, _NO_SECTION, _NO_MEDIA),
    _off("policy.generation.vllm_cfg.video", _MEDIA, _NO_SECTION, _NO_MEDIA),
    _off("policy.is_vlm", "a vision or audio model", remedy="set policy.model_name to a text-only model"),
    _off(f"{_MEGATRON}.clear_memory_caches_before_refit", "clearing Megatron's caches before a refit"),
    *(
        _off(f"{_MEGATRON}.freeze_{part}", "a frozen part of the model", remedy=_ALL_WEIGHTS)
        for part in ("sound_encoder", "sound_projection", "vision_model", "vision_projection")
    ),
    _off(f"{_MEGATRON}.radio_force_cpe_eval_mode", "a vision model", remedy=_NO_MEDIA),
    _off(f"{_MEGATRON}.use_gloo_process_groups", "Gloo process groups in addition to NCCL's"),
    _off("policy.quant_cfg", _QUANTISED, _NULL, _NOT_QUANTISED),
    _off("policy.router_replay.enabled", "router replay"),
    _off("policy.tokenizer.video", _MEDIA, _NO_SECTION, _NO_MEDIA),
    _off("policy.tokenizer.use_fastokens", "fastokens"),
    *(
        _off(f"reward_penalties.penalize_{what}", "reward penalties")
        for what in ("duplicated_reasoning", "empty_final_answer", "malformed_think_tag", "unwanted_tokens")
    ),
    _off("reward_penalties.token_ids", "reward penalties", _NULL),
    *_switched_off(
        "data_plane",
        "the data plane",
        "backend claim_meta_poll_interval_s global_segment_size impl local_buffer_size num_storage_units "
        "storage_capacity",
    ),
    *_switched_off("policy.draft", "draft models", "aux_layer_indices loss_weight model_name num_layers"),
    *_switched_off(
        "policy.dtensor_cfg",
        "the DTensor policy",
        "_v2 activation_checkpointing automodel_kwargs clear_cache_every_n_steps context_parallel_size cpu_offload "
        "custom_parallel_plan dp_replicate_size env_vars lora_cfg.enabled sequence_parallel tensor_parallel_size",
        "set it to {off}; the Megatron policy is policy.megatron_cfg",
    ),
    *each("policy.dtensor_cfg.lora_cfg", _LORA, Kind.NOT_IN_USE, "tunes the DTensor policy, which is off"),
    *_switched_off(
        "policy.dynamic_batching",
        "dynamic batching",
        "logprob_mb_tokens sequence_length_round train_mb_tokens",
        "set it to {off}; sequence_packing does its work",
    ),
    *_switched_off(f"{_MEGATRON}.fp8_cfg", "fp8", "fp8 fp8_param fp8_recipe"),
    *_switched_off(f"{_MEGATRON}.peft", "LoRA", _LORA),
    *(
        Row(key, Kind.NO_EFFECT, why)
        for key, why in {
            "env.*.stop_strings": _NOT_READ + "policy.generation.stop_strings ends answers",
            "grpo.zero_variance_prompt_filtering": _NOT_READ
            + "grpo.use_dynamic_sampling drops prompts whose rewards are all equal",
            "logger.tensorboard.log_dir": _RUN_FOLDER,
            "policy.generation.vllm_cfg.cap_max_tokens_to_context": "a prompt plus its answer never exceeds "
            "policy.max_total_sequence_length",
            f"{_MEGATRON}.converter_type": "the model's Hugging Face config determines its architecture",
            f"{_MEGATRON}.defer_fp32_logits": _ALWAYS_ON + "logits have the dtype policy.precision, and float32 values "
            "are computed from them in chunks of tokens",
            "policy.sequence_packing.fuse_loss": _ALWAYS_ON
            + "log-probs and loss of a packed row are computed in one pass",
            f"{_MEGATRON}.track_moe_metrics": _NOT_READ
            + "the experts' auxiliary losses are logged wherever the recipe has them",
            "policy.optimizer": f"only the DTensor policy reads it; Megatron reads {_MEGATRON}.optimizer",
            "policy.scheduler": f"only the DTensor policy reads it; Megatron reads {_MEGATRON}.scheduler",
        }.items()
    ),
    *(
        row
        for why, keys in {
            "is for the DTensor policy; Megatron's checkpoints have one format": "checkpointing.model_save_format",
            "batches are prepared in the driver": "data.num_workers",
            "tunes NeMo Gym, which is not in use": "env.should_log_nemo_gym_responses env.should_mask_flagged_samples",
            "is read by other estimators than grpo": "grpo.adv_estimator.minus_baseline",
            "tunes mlflow_enabled, which is off": "logger.mlflow",
            "tunes swanlab_enabled, which is off": "logger.swanlab",
            _RUN_FOLDER: "logger.tensorboard",
            "weights are always read from the Hugging Face files": f"{_MEGATRON}.force_reconvert_from_hf",
        }.items()
        for row in (Row(key, Kind.NOT_IN_USE, why) for key in keys.split())
    ),
    *(
        row
        for why, names in {
            "tunes generation with Megatron, which is not in use": "mcore_generation_config",
            "engines open no port to others": "port_range_high port_range_low",
            "is not read: vllm_cfg.expert_parallel_size above 1 turns it on": "vllm_cfg.enable_expert_parallel",
            "tunes a backend of generation that this package lacks": "dynamo_cfg trtllm_cfg trtllm_kwargs",
            "tunes NeMo-RL's refit transports, which are not in use": "refit_cfg",
            "is for vLLM's asynchronous engine or servers, which are not in use": "vllm_cfg.reasoning_parser_plugin "
            "vllm_cfg.enable_vllm_metrics_logger vllm_cfg.http_refit_api_key_env_var "
            "vllm_cfg.http_server_serving_chat_kwargs vllm_cfg.vllm_metrics_logger_interval",
            "engines have no terminal to draw a progress bar on": "vllm_cfg.use_tqdm",
            _QUANTISED_OFF: "real_quant_export_cpu_offload real_quant_ignore vllm_cfg.quantization_ignored_layer_kws",
        }.items()
        for row in each("policy.generation", names, Kind.NOT_IN_USE, why)
    ),
    Row("policy.disable_modelopt_layer_spec", Kind.NOT_IN_USE, _QUANTISED_OFF),
    *(
        Row(key, Kind.OTHER_VALUE, "is not supported here", remedy=remedy)
        for key, remedy in {
            "data.default.processor": "prompts are built from prompt_file, system_prompt_file and the chat template; "
            "set data.default.processor to math_hf_data_processor (GRPO), sft_processor (SFT) or "
            "preference_preprocessor (DPO), or delete the key",
            "grpo.adv_estimator.name": "set grpo.adv_estimator.name=grpo",
            "grpo.async_grpo.max_generation_failures": "set it to 0: a run whose engine has failed resumes from its "
            "newest checkpoint",
            "policy.generation.backend": "set policy.generation.backend=vllm, or transformers",
            "policy.generation.vllm_cfg.precision": "fp8 generation is missing: engines have the policy's unquantised "
            "weights; set policy.generation.vllm_cfg.precision=bfloat16, or float32",
            f"{_MEGATRON}.enabled": f"set {_MEGATRON}.enabled=true: Megatron is the only policy backend here",
            "policy.precision": "set policy.precision=bfloat16, or float32 on CPUs",
            "policy.sequence_packing.algorithm": "set policy.sequence_packing.algorithm=modified_first_fit_decreasing",
        }.items()
    ),
    # NeMo-RL's recipes for NeMo Gym set these to null; with other environments NeMo-RL needs a number, too.
    *(
        Row(
            key,
            Kind.OTHER_VALUE,
            "null is for NeMo Gym alone, which this package does not support",
            remedy="set it to a number of 1 or more",
        )
        for key in ("data.max_input_seq_length", "grpo.max_val_samples", "grpo.val_batch_size")
    ),
)

# Sections that contain only keys of the rows, each after those in it; they may be empty or null.
NEMO_RL_SECTIONS = (
    *("data_plane", "policy.draft", "policy.dtensor_cfg.lora_cfg", "policy.dtensor_cfg"),
    *("policy.dynamic_batching", f"{_MEGATRON}.fp8_cfg", f"{_MEGATRON}.peft", "policy.router_replay"),
    "reward_penalties",
)

# Supported dataset_name: what to write with it instead of a dataset that only NeMo-RL supports.
OTHER_DATASETS: dict[str, str] = {
    "ResponseDataset": "give your data as a JSONL file (ResponseDataset), a datasets folder (HFDataset) or a class "
    "(package.module.Class)",
    "PreferenceDataset": "give your pairs as a JSONL file or a datasets folder whose rows have a prompt, a chosen and "
    "a rejected answer (BinaryPreferenceDataset) or ranked completions (PreferenceDataset), or as a class "
    "(package.module.Class)",
}
OTHER_ALGORITHMS: dict[str, str] = {"rm": "reward-model training", "distillation": "distillation", "ppo": "PPO"}


_OFF_ON_CPU_ROWS = (
    # The engines that run without a GPU, first the one that replaces others there.
    Row("policy.generation.backend", Kind.OFF_ON_CPU, "names an engine that needs a GPU", ("transformers",)),
    *each("logger", "monitor_gpus profile.memory profile.nvtx", Kind.OFF_ON_CPU, "needs a GPU", (False,)),
)
ROWS: tuple[Row, ...] = (*NEMO_RL_ROWS, *MEGATRON_ROWS, *_OFF_ON_CPU_ROWS)


def rows_of(*kinds: Kind) -> tuple[Row, ...]:
    """Returns the rows of some kinds."""
    return tuple(row for row in ROWS if row.kind in kinds)


def row_of(path: str, *kinds: Kind) -> Row | None:
    """Returns the first row of some kinds about a key without names that the user chooses; None if there is none."""
    return next((row for row in ROWS if row.key == path and row.kind in kinds), None)


def not_allowed(config: Any, kind: Kind) -> Iterator[tuple[Row, str, Any]]:
    """Yields the rows of a kind whose key the config has with another value than they allow, its path and the value."""
    for row in rows_of(kind):
        for path, value in matches(config, row.key):
            if not row.allows(value):
                yield row, path, value


def accepted_paths() -> tuple[str, ...]:
    """Returns NeMo-RL's keys that are accepted with any value."""
    return tuple(row.key for row in rows_of(Kind.NO_EFFECT, Kind.NOT_IN_USE))


def nemo_rl_paths() -> tuple[str, ...]:
    """Returns NeMo-RL's keys that are removed from a recipe."""
    return tuple(row.key for row in rows_of(Kind.OFF_ONLY, Kind.NO_EFFECT, Kind.NOT_IN_USE))
