"""Rows about Megatron's fields: those with few allowed values, and those that are off on a CPU.

To add support for a field, delete its row.
"""

from nemo_offload_rl.config.key_table.row import Kind, Row, each

MEGATRON = "policy.megatron_cfg"
OPTIMIZER = f"{MEGATRON}.optimizer"
DDP = f"{MEGATRON}.distributed_data_parallel_config"

_OFF = (False, None)
_NULL = (None,)
_NOT_HERE = "is not supported here"
_FP8 = "fp8 is not supported here yet"
_FP4 = "fp4 is not supported here yet"
_CP = "context parallelism is not supported here yet"
_MTP = "multi-token prediction is not supported here"
_OLD_NAME = "is megatron-core's old name"
_NOT_READ = "is not read by megatron-core 0.19.2"
_OWN_TRAINER = "is read by Megatron's own training loop, which is not used here"
_OTHER_OPTIMIZER = "belongs to an optimizer other than adam and sgd, which is not supported here"
_FLOAT16 = "has an effect in float16 training only, which is not supported here"
_FSDP = "has an effect with Megatron-FSDP only, which is not supported here"
_INFERENCE = "has an effect in Megatron's inference only, which is not used here"
_TP_OVERLAP = "is for tp_comm_overlap, which is not supported here"
_CPU_OFFLOADING = "megatron-core's layer-wise cpu_offloading is not supported here"
_FINE_GRAINED = f"leave it at {{off}} or delete the key, and use {MEGATRON}.fine_grained_activation_offloading"

_FIXED = (
    *each(
        MEGATRON,
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels num_moe_experts "
        "vocab_size position_embedding_type share_embeddings_and_output_weights multi_latent_attention is_hybrid_model "
        "hf_model_id hf_model_revision experimental_attention_variant",
        Kind.FIXED,
        "comes from the model's Hugging Face config",
        remedy="set it there (policy.hf_config, policy.hf_config_overrides)",
    ),
    *each(
        MEGATRON,
        "params_dtype bf16 fp16 autocast_dtype",
        Kind.FIXED,
        "follows from policy.precision",
        remedy="set that key instead",
    ),
    Row(f"{MEGATRON}.enable_autocast", Kind.FIXED, "follows from policy.precision", _OFF, "set that key instead"),
    *each(
        MEGATRON,
        "perform_initialization use_cpu_initialization init_model_with_meta_device transformer_impl "
        "variable_seq_lengths calculate_per_token_loss deallocate_pipeline_outputs seq_length parallel_output "
        "should_pad_vocab use_te_rng_tracker hidden_dropout attention_dropout cross_entropy_loss_fusion "
        "restore_modelopt_state",
        Kind.FIXED,
        "is set by this package for the device it runs on",
    ),
    *each(MEGATRON, "fp8 fp8_quantizer_factory quant_recipe optimizer.fp8_recipe", Kind.FIXED, _FP8, _NULL),
    *each(
        MEGATRON,
        "fp8_param fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention moe_router_padding_for_fp8 "
        "moe_router_padding_for_quantization use_kitchen optimizer.reuse_grad_buf_for_mxfp8_param_ag",
        Kind.FIXED,
        _FP8,
        _OFF,
    ),
    *each(DDP, "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag", Kind.FIXED, _FP8, _OFF),
    *each(MEGATRON, "fp4 fp4_quantizer_factory", Kind.FIXED, _FP4, _NULL),
    *each(MEGATRON, "fp4_param distributed_data_parallel_config.fp4_param_gather", Kind.FIXED, _FP4, _OFF),
    Row(
        f"{MEGATRON}.moe_layer_recompute",
        Kind.FIXED,
        _OLD_NAME,
        _OFF,
        f"list moe in {MEGATRON}.recompute_modules, and delete it",
    ),
    Row(
        f"{MEGATRON}.cuda_graph_impl",
        Kind.FIXED,
        "only graphs of Transformer Engine are captured here: local graphs are captured outside the training step, and "
        "full_iteration graphs fix the number of micro-batches",
        ("none", "transformer_engine"),
        "use transformer_engine or none",
    ),
    *each(
        MEGATRON,
        "enable_cuda_graph external_cuda_graph",
        Kind.FIXED,
        _OLD_NAME,
        _OFF,
        f"set {MEGATRON}.cuda_graph_impl to transformer_engine, and delete it",
    ),
    Row(
        f"{MEGATRON}.cuda_graph_scope",
        Kind.FIXED,
        _OLD_NAME,
        _NULL,
        f"list the modules in {MEGATRON}.cuda_graph_modules, and delete it",
    ),
    Row(
        f"{MEGATRON}.inference_cuda_graph_scope",
        Kind.FIXED,
        "CUDA graphs of Megatron's inference are not supported here",
        (None, "none"),
        f"leave it at {{off}} ({MEGATRON}.cuda_graph_modules is for training)",
    ),
    Row(f"{MEGATRON}.cuda_graph_use_single_mempool", Kind.FIXED, _NOT_READ, (True,), "delete it"),
    Row(f"{MEGATRON}.context_parallel_size", Kind.FIXED, _CP, (1,)),
    *each(
        MEGATRON, "hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank cp_comm_type", Kind.FIXED, _CP, _NULL
    ),
    Row(f"{MEGATRON}.hybrid_context_parallel", Kind.FIXED, _CP, _OFF),
    Row(
        f"{MEGATRON}.tp_comm_overlap",
        Kind.FIXED,
        "needs user buffers of Transformer Engine, which are not set up here",
        _OFF,
    ),
    Row(f"{MEGATRON}.tp_comm_overlap_cfg", Kind.FIXED, _TP_OVERLAP, _NULL, "delete it"),
    Row(f"{MEGATRON}.tp_comm_bootstrap_backend", Kind.FIXED, _TP_OVERLAP, ("nccl",), "delete it"),
    Row(
        f"{MEGATRON}.pipeline_model_parallel_comm_backend",
        Kind.FIXED,
        "is read by Megatron's own start of distributed training, which is not used here: pipeline stages send with "
        "the backend of all groups",
        (None, "nccl"),
    ),
    *each(MEGATRON, "gtp_weight_remat_size expert_gtp_weight_remat_size", Kind.FIXED, _NOT_HERE, (1,)),
    *each(
        MEGATRON,
        "tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards",
        Kind.FIXED,
        "more shards of a weight than tensor_model_parallel_size are not supported here",
        _NULL,
        "leave it at {off}, and set that key",
    ),
    # megatron-core reads overlap_dispatch_backward_with_experts_wgrad only with its FSDP, but Transformer Engine always
    # does: expert weights then get gradients before these are written.
    *each(
        MEGATRON,
        "overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release delay_wgrad_compute "
        "overlap_dispatch_backward_with_experts_wgrad defer_embedding_wgrad_compute moe_enable_routing_replay "
        "heterogeneous_block_specs use_inference_optimized_layers test_mode "
        "optimizer.use_layer_wise_distributed_optimizer optimizer.overlap_param_gather_with_optimizer_step "
        "distributed_data_parallel_config.delay_wgrad_compute",
        Kind.FIXED,
        _NOT_HERE,
        _OFF,
    ),
    *each(
        MEGATRON,
        "moe_expert_rank_capacity_factor num_microbatches_with_partial_activation_checkpoints",
        Kind.FIXED,
        _NOT_HERE,
        _NULL,
    ),
    Row(f"{MEGATRON}.cpu_offloading", Kind.FIXED, _CPU_OFFLOADING, _OFF, _FINE_GRAINED),
    Row(f"{MEGATRON}.cpu_offloading_num_layers", Kind.FIXED, _CPU_OFFLOADING, (0,), _FINE_GRAINED),
    Row(
        f"{MEGATRON}.moe_paged_stash",
        Kind.FIXED,
        "megatron-core's paged stash is not supported here",
        _OFF,
        f"leave it at {{off}}, and name expert_fc1 and moe_act in {MEGATRON}.offload_modules",
    ),
    Row(f"{MEGATRON}.mtp_num_layers", Kind.FIXED, _MTP, (0, None)),
    *each(MEGATRON, "mtp_enabled mtp_standalone", Kind.FIXED, _MTP, _OFF),
    Row(f"{MEGATRON}.mtp_hybrid_override_pattern", Kind.FIXED, _MTP, _NULL),
    *each(MEGATRON, "qk_clip log_max_attention_logit", Kind.FIXED, _OWN_TRAINER, _OFF),
    *each(
        MEGATRON,
        "apply_residual_connection_post_layernorm use_grouped_gemm_for_dense_mlp "
        "optimizer.use_torch_optimizer_for_cpu_offload",
        Kind.FIXED,
        _NOT_READ,
        _OFF,
    ),
    Row(
        f"{MEGATRON}.moe_token_dropping",
        Kind.FIXED,
        _NOT_READ,
        _OFF,
        f"leave it at {{off}}, and set {MEGATRON}.moe_expert_capacity_factor to drop tokens",
    ),
    *each(
        MEGATRON,
        "inference_rng_tracker nccl_all_reduce_for_prefill moe_pad_experts_for_cuda_graph_inference",
        Kind.FIXED,
        _INFERENCE,
        _OFF,
        "delete it",
    ),
    Row(f"{MEGATRON}.inference_sampling_seed", Kind.FIXED, _INFERENCE),
    Row(f"{OPTIMIZER}.fp16", Kind.FIXED, "float16 training is not supported here", (False,), "use bfloat16"),
    *each(
        OPTIMIZER,
        "pin_cpu_grads pin_cpu_params",
        Kind.FIXED,
        "host memory of the CPU optimizer is always page-locked here",
        (True,),
    ),
    Row(
        f"{OPTIMIZER}.main_grads_dtype",
        Kind.FIXED,
        _NOT_READ,
        ("float32", None),
        f"leave it at {{off}}, and set the gradients' type with {DDP}.grad_reduce_in_fp32",
    ),
    Row(
        f"{OPTIMIZER}.optimizer_cuda_graph",
        Kind.FIXED,
        "the optimizer's step is not captured here",
        _OFF,
        f"leave it at {{off}} ({MEGATRON}.cuda_graph_modules lists the parts that are)",
    ),
    *each(
        OPTIMIZER,
        "muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type "
        "muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2 "
        "soap_shampoo_beta soap_use_kl_shampoo soap_precondition_frequency adaptive_muon_moment2_method "
        "adaptive_muon_beta2 adaptive_muon_eps",
        Kind.FIXED,
        _OTHER_OPTIMIZER,
    ),
    *each(OPTIMIZER, "initial_loss_scale min_loss_scale loss_scale_window hysteresis", Kind.FIXED, _FLOAT16),
    Row(f"{OPTIMIZER}.overlap_param_gather", Kind.FIXED, f"is set in {DDP}", remedy="delete it here"),
    Row(f"{DDP}.use_distributed_optimizer", Kind.FIXED, f"is set in {OPTIMIZER}", remedy="delete it here"),
    *each(DDP, "use_custom_fsdp use_megatron_fsdp", Kind.FIXED, "Megatron-FSDP is not supported here", _OFF),
    Row(f"{DDP}.outer_dp_sharding_strategy", Kind.FIXED, _FSDP, ("no_shard",), "delete it"),
    *each(
        DDP,
        "gradient_reduce_div_fusion suggested_communication_unit_size keep_fp8_transpose_cache fsdp_double_buffer "
        "fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync fsdp_manual_registration "
        "megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype "
        "megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode megatron_fsdp_enable_fine_grained_param_gather "
        "megatron_fsdp_max_pool_double_buffer",
        Kind.FIXED,
        _FSDP,
    ),
    Row(f"{DDP}.num_buckets", Kind.FIXED, _OWN_TRAINER, _NULL, "delete it, and set bucket_size"),
    Row(f"{DDP}.num_distributed_optimizer_instances", Kind.FIXED, _NOT_HERE, (1,)),
)

_TE = "needs Transformer Engine on a GPU"
_GRAPHS = "needs CUDA graphs of Transformer Engine"
_FOLLOWS = "follows optimizer.use_precision_aware_optimizer, which " + _TE

_OFF_ON_CPU = (
    *each(
        MEGATRON,
        "apply_rope_fusion fused_single_qkv_rope moe_permute_fusion moe_router_fusion use_te_activation_func "
        "use_transformer_engine_op_fuser fine_grained_activation_offloading optimizer.use_precision_aware_optimizer",
        Kind.OFF_ON_CPU,
        _TE,
        _OFF,
    ),
    *each(
        MEGATRON,
        "bias_activation_fusion bias_dropout_fusion gradient_accumulation_fusion masked_softmax_fusion "
        "persist_layer_norm moe_grouped_gemm moe_enable_deepep use_fused_weighted_squared_relu",
        Kind.OFF_ON_CPU,
        "needs a GPU",
        _OFF,
    ),
    *each(
        MEGATRON,
        "moe_shared_expert_overlap distributed_data_parallel_config.overlap_param_gather "
        "distributed_data_parallel_config.overlap_grad_reduce",
        Kind.OFF_ON_CPU,
        "needs CUDA streams",
        _OFF,
    ),
    Row(f"{MEGATRON}.delay_offload_until_cuda_graph", Kind.OFF_ON_CPU, _GRAPHS, _OFF),
    Row(f"{MEGATRON}.cuda_graph_impl", Kind.OFF_ON_CPU, _GRAPHS, ("none", None)),
    Row(
        f"{OPTIMIZER}.optimizer_cpu_offload",
        Kind.OFF_ON_CPU,
        "needs a GPU; here the whole optimizer runs on the CPU",
        _OFF,
    ),
    *each(
        OPTIMIZER,
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        Kind.OFF_ON_CPU,
        _FOLLOWS,
        ("float32", None),
    ),
    Row(f"{DDP}.nccl_ub", Kind.OFF_ON_CPU, "needs NCCL", _OFF),
)

_UNKNOWN_SIZES = tuple(
    Row(
        f"{MEGATRON}.{name}",
        Kind.UNKNOWN_SIZES,
        "changes the model's sizes in a way that the plan does not know",
        values,
        "the worker determines the exact sizes when it builds the model",
    )
    for name, values in {
        "normalization": ("RMSNorm", None),
        "gated_linear_unit": (True, None),
        "softmax_type": ("vanilla", "off-by-one", None),
        "attention_output_gate": _OFF,
        "linear_attention_freq": _NULL,
        "moe_latent_size": _NULL,
        "moe_shared_expert_intermediate_size": _NULL,
        "pipeline_model_parallel_layout": _NULL,
        "account_for_embedding_in_pipeline_split": _OFF,
        "account_for_loss_in_pipeline_split": _OFF,
    }.items()
)

MEGATRON_ROWS: tuple[Row, ...] = (*_FIXED, *_OFF_ON_CPU, *_UNKNOWN_SIZES)
