"""Megatron's fields that this package sets itself or does not support yet, each with the values that a recipe may give.

To add support for a field, delete its entry.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Owned:
    """Holds the only values that a recipe may give a field, and the reason."""

    values: tuple[Any, ...]
    why: str


_ELSEWHERE = "comes from the model's Hugging Face config; set it there (policy.hf_config, policy.hf_config_overrides)"
_PRECISION = "follows from policy.precision; set that key instead"
_ITSELF = "is set by this package for the device it runs on; delete it"
_FP8 = "fp8 is not supported here yet; leave it off"
_FP4 = "fp4 is not supported here yet; leave it off"
_OTHER_GRAPHS = (
    "only graphs of Transformer Engine are captured here: local graphs are captured outside the training step, and "
    "full_iteration graphs fix the number of micro-batches; use transformer_engine or none"
)
_OLD_GRAPH_SWITCH = (
    "is megatron-core's old name; set policy.megatron_cfg.cuda_graph_impl to transformer_engine, and delete it"
)
_OLD_RECOMPUTATION = "is megatron-core's old name; list moe in policy.megatron_cfg.recompute_modules, and delete it"
_OLD_GRAPH_SCOPE = (
    "is megatron-core's old name; list the modules in policy.megatron_cfg.cuda_graph_modules, and delete it"
)
_INFERENCE_GRAPHS = (
    "CUDA graphs of Megatron's inference are not supported here; leave it at null "
    "(policy.megatron_cfg.cuda_graph_modules is for training)"
)
_OPTIMIZER_GRAPHS = (
    "the optimizer's step is not captured here; leave it off (policy.megatron_cfg.cuda_graph_modules lists the "
    "parts that are)"
)
_CP = "context parallelism is not supported here yet; leave it at 1 and off"
_CPU_OFFLOADING = (
    "megatron-core's layer-wise cpu_offloading is not supported here; leave it off, and use "
    "policy.megatron_cfg.fine_grained_activation_offloading"
)
_PAGED_STASH = (
    "megatron-core's paged stash is not supported here; leave it off, and name expert_fc1 and moe_act in "
    "policy.megatron_cfg.offload_modules"
)
_MTP = "multi-token prediction is not supported here; leave it off"
_FSDP = "Megatron-FSDP is not supported here; leave it off"
_PINNED = "host memory of the CPU optimizer is always page-locked here; leave it at true"
_NOT_READ = "is not read by megatron-core 0.19.2; leave it off"
_NO_GRADS_DTYPE = (
    "is not read by megatron-core 0.19.2; leave it at float32, and set the gradients' type with "
    "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32"
)
_TOKEN_DROPPING = f"{_NOT_READ}, and set policy.megatron_cfg.moe_expert_capacity_factor to drop tokens"
_OWN_TRAINER = "is done by Megatron's own training loop, which is not used here; leave it off"
_PIPELINE_BACKEND = (
    "is read by Megatron's own start of distributed training, which is not used here: pipeline stages send with the "
    "backend of all groups; leave it at null"
)
_TP_OVERLAP = "is for tp_comm_overlap, which is not supported here; delete it"
_WEIGHT_SHARDS = (
    "more shards of a weight than tensor_model_parallel_size are not supported here; leave it at null, and set that key"
)
_INFERENCE = "has an effect in Megatron's inference only, which is not used here; delete it"
_NUM_BUCKETS = "is read by Megatron's own training loop, which is not used here; delete it, and set bucket_size"
_NCCL_BUFFERS = (
    "registers buffers with NCCL, which the residency engine moves into memory of its own: they would take the memory "
    "twice, and NCCL would use none of it; leave it off"
)
_NOT_HERE = "is not supported here; leave it off"
_OTHER_OPTIMIZER = "belongs to an optimizer other than adam and sgd, which is not supported here; delete it"
_FLOAT16_ONLY = "has an effect in float16 training only, which is not supported here; delete it"
_FSDP_ONLY = "has an effect with Megatron-FSDP only, which is not supported here; delete it"

OFF = (False, None)

OWNED_FIELDS: dict[str, dict[str, Owned]] = {
    "policy.megatron_cfg": {
        # The model's shape.
        **dict.fromkeys(
            (
                "num_layers",
                "hidden_size",
                "ffn_hidden_size",
                "num_attention_heads",
                "num_query_groups",
                "kv_channels",
                "num_moe_experts",
                "vocab_size",
                "position_embedding_type",
                "share_embeddings_and_output_weights",
                "multi_latent_attention",
                "is_hybrid_model",
                "hf_model_id",
                "hf_model_revision",
                "experimental_attention_variant",
            ),
            Owned((), _ELSEWHERE),
        ),
        # Precision.
        **dict.fromkeys(("params_dtype", "bf16", "fp16", "autocast_dtype"), Owned((), _PRECISION)),
        "enable_autocast": Owned(OFF, _PRECISION),
        # Fields that the worker derives.
        **dict.fromkeys(
            (
                "perform_initialization",
                "use_cpu_initialization",
                "init_model_with_meta_device",
                "transformer_impl",
                "variable_seq_lengths",
                "calculate_per_token_loss",
                "deallocate_pipeline_outputs",
                "seq_length",
                "parallel_output",
                "should_pad_vocab",
                "use_te_rng_tracker",
                "hidden_dropout",
                "attention_dropout",
                "cross_entropy_loss_fusion",
                "restore_modelopt_state",
            ),
            Owned((), _ITSELF),
        ),
        # fp8 and fp4.
        **dict.fromkeys(("fp8", "fp8_quantizer_factory"), Owned((None,), _FP8)),
        **dict.fromkeys(
            ("fp8_param", "fp8_output_proj", "fp8_dot_product_attention", "fp8_multi_head_attention"), Owned(OFF, _FP8)
        ),
        **dict.fromkeys(("fp4", "fp4_quantizer_factory"), Owned((None,), _FP4)),
        "fp4_param": Owned(OFF, _FP4),
        **dict.fromkeys(("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"), Owned(OFF, _FP8)),
        "quant_recipe": Owned((None,), _FP8),
        "use_kitchen": Owned(OFF, _FP8),
        # Recomputation.
        "num_microbatches_with_partial_activation_checkpoints": Owned((None,), _NOT_HERE),
        "moe_layer_recompute": Owned(OFF, _OLD_RECOMPUTATION),
        # CUDA graphs.
        "cuda_graph_impl": Owned(("none", "transformer_engine"), _OTHER_GRAPHS),
        **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), Owned(OFF, _OLD_GRAPH_SWITCH)),
        "cuda_graph_scope": Owned((None,), _OLD_GRAPH_SCOPE),
        "inference_cuda_graph_scope": Owned((None, "none"), _INFERENCE_GRAPHS),
        "cuda_graph_use_single_mempool": Owned((True,), "is not read by megatron-core 0.19.2; delete it"),
        # Parallelism.
        "context_parallel_size": Owned((1,), _CP),
        "hierarchical_context_parallel_sizes": Owned((None,), _CP),
        "hybrid_context_parallel": Owned(OFF, _CP),
        "max_seqlen_per_dp_cp_rank": Owned((None,), _CP),
        "cp_comm_type": Owned((None,), _CP),
        "tp_comm_overlap": Owned(
            OFF, "needs user buffers of Transformer Engine, which are not set up here; leave it off"
        ),
        "tp_comm_overlap_cfg": Owned((None,), _TP_OVERLAP),
        "tp_comm_bootstrap_backend": Owned(("nccl",), _TP_OVERLAP),
        "pipeline_model_parallel_comm_backend": Owned((None, "nccl"), _PIPELINE_BACKEND),
        **dict.fromkeys(("gtp_weight_remat_size", "expert_gtp_weight_remat_size"), Owned((1,), _NOT_HERE)),
        **dict.fromkeys(
            ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
            Owned((None,), _WEIGHT_SHARDS),
        ),
        **dict.fromkeys(
            (
                "overlap_moe_expert_parallel_comm",
                "ep_overlap_early_attn_memory_release",
                "delay_wgrad_compute",
                # megatron-core reads it only with its FSDP, but Transformer Engine always does: expert weights then
                # get gradients before these are written.
                "overlap_dispatch_backward_with_experts_wgrad",
                "defer_embedding_wgrad_compute",
            ),
            Owned(OFF, _NOT_HERE),
        ),
        "moe_expert_rank_capacity_factor": Owned((None,), _NOT_HERE),
        # Offloading.
        "cpu_offloading": Owned(OFF, _CPU_OFFLOADING),
        "cpu_offloading_num_layers": Owned((0,), _CPU_OFFLOADING),
        "moe_paged_stash": Owned(OFF, _PAGED_STASH),
        # Features of other kinds.
        "mtp_num_layers": Owned((0, None), _MTP),
        "mtp_enabled": Owned(OFF, _MTP),
        "mtp_standalone": Owned(OFF, _MTP),
        "mtp_hybrid_override_pattern": Owned((None,), _MTP),
        **dict.fromkeys(("qk_clip", "log_max_attention_logit"), Owned(OFF, _OWN_TRAINER)),
        **dict.fromkeys(
            ("apply_residual_connection_post_layernorm", "use_grouped_gemm_for_dense_mlp"), Owned(OFF, _NOT_READ)
        ),
        "moe_token_dropping": Owned(OFF, _TOKEN_DROPPING),
        **dict.fromkeys(
            ("inference_rng_tracker", "nccl_all_reduce_for_prefill", "moe_pad_experts_for_cuda_graph_inference"),
            Owned(OFF, _INFERENCE),
        ),
        "inference_sampling_seed": Owned((), _INFERENCE),
        "moe_enable_routing_replay": Owned(OFF, _NOT_HERE),
        "heterogeneous_block_specs": Owned(OFF, _NOT_HERE),
        "use_inference_optimized_layers": Owned(OFF, _NOT_HERE),
        "test_mode": Owned(OFF, _NOT_HERE),
    },
    "policy.megatron_cfg.optimizer": {
        "fp16": Owned((False,), "float16 training is not supported here; use bfloat16"),
        "fp8_recipe": Owned((None,), _FP8),
        "reuse_grad_buf_for_mxfp8_param_ag": Owned(OFF, _FP8),
        **dict.fromkeys(("pin_cpu_grads", "pin_cpu_params"), Owned((True,), _PINNED)),
        "use_torch_optimizer_for_cpu_offload": Owned(OFF, _NOT_READ),
        "main_grads_dtype": Owned(("float32", None), _NO_GRADS_DTYPE),
        "use_layer_wise_distributed_optimizer": Owned(OFF, _NOT_HERE),
        "overlap_param_gather_with_optimizer_step": Owned(OFF, _NOT_HERE),
        "optimizer_cuda_graph": Owned(OFF, _OPTIMIZER_GRAPHS),
        **dict.fromkeys(
            (
                *("muon_momentum", "muon_split_qkv", "muon_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec"),
                *("muon_coefficient_type", "muon_num_ns_steps", "muon_tp_mode", "muon_extra_scale_factor"),
                *("muon_scalar_optimizer", "lion_beta1", "lion_beta2", "soap_shampoo_beta", "soap_use_kl_shampoo"),
                *("soap_precondition_frequency", "adaptive_muon_moment2_method", "adaptive_muon_beta2"),
                "adaptive_muon_eps",
            ),
            Owned((), _OTHER_OPTIMIZER),
        ),
        **dict.fromkeys(
            ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), Owned((), _FLOAT16_ONLY)
        ),
        "overlap_param_gather": Owned(
            (), "is set in policy.megatron_cfg.distributed_data_parallel_config; delete it here"
        ),
    },
    "policy.megatron_cfg.distributed_data_parallel_config": {
        "use_distributed_optimizer": Owned((), "is set in policy.megatron_cfg.optimizer; delete it here"),
        **dict.fromkeys(("use_custom_fsdp", "use_megatron_fsdp"), Owned(OFF, _FSDP)),
        "outer_dp_sharding_strategy": Owned(("no_shard",), _FSDP_ONLY),
        **dict.fromkeys(
            (
                *("gradient_reduce_div_fusion", "suggested_communication_unit_size", "keep_fp8_transpose_cache"),
                *("fsdp_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail", "fsdp_all_gather_in_start_param_sync"),
                *("fsdp_manual_registration", "megatron_fsdp_main_params_dtype", "megatron_fsdp_main_grads_dtype"),
                *("megatron_fsdp_grad_comm_dtype", "megatron_fsdp_use_decoupled_grad", "megatron_fsdp_cuda_graph_mode"),
                *("megatron_fsdp_enable_fine_grained_param_gather", "megatron_fsdp_max_pool_double_buffer"),
            ),
            Owned((), _FSDP_ONLY),
        ),
        "num_buckets": Owned((None,), _NUM_BUCKETS),
        "fp8_param_gather": Owned(OFF, _FP8),
        "fp4_param_gather": Owned(OFF, _FP4),
        "reuse_grad_buf_for_mxfp8_param_ag": Owned(OFF, _FP8),
        "delay_wgrad_compute": Owned(OFF, _NOT_HERE),
        **dict.fromkeys(("nccl_ub", "disable_symmetric_registration"), Owned(OFF, _NCCL_BUFFERS)),
        "num_distributed_optimizer_instances": Owned((1,), _NOT_HERE),
    },
}


def refuse(section: str, name: str, value: Any) -> str | None:
    """Returns why a recipe may not give a field this value; None if it may."""
    owned = OWNED_FIELDS[section].get(name)
    if owned is None or any(same(value, allowed) for allowed in owned.values):
        return None
    return owned.why


def same(value: Any, other: Any) -> bool:
    """Returns whether two values are equal, where false is not 0 and true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
