"""Rows about Megatron's fields: which pass, which have few allowed values, and which are off on a CPU.

To add support for a field, delete its row of the kind FIXED, and add one that names the test of its effect.
"""

from typing import Any

from nemo_offload_rl.config.key_table.row import Kind, Row, each

MEGATRON = "policy.megatron_cfg"
OPTIMIZER = f"{MEGATRON}.optimizer"
DDP = f"{MEGATRON}.distributed_data_parallel_config"

_OFF = (False, None)
_NULL = (None,)


def _fixed(names: str, why: str, values: tuple[Any, ...] = (), remedy: str = "") -> list[Row]:
    return each(MEGATRON, names, Kind.FIXED, why, values, remedy)


def _off_on_cpu(names: str, why: str, values: tuple[Any, ...] = _OFF) -> list[Row]:
    return each(MEGATRON, names, Kind.OFF_ON_CPU, why, values)


_FIXED = (
    *_fixed(
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels num_moe_experts "
        "vocab_size position_embedding_type share_embeddings_and_output_weights multi_latent_attention "
        "is_hybrid_model hf_model_id hf_model_revision experimental_attention_variant",
        "comes from the model's Hugging Face config",
        remedy="set it there (policy.hf_config, policy.hf_config_overrides)",
    ),
    *_fixed(
        "params_dtype bf16 fp16 autocast_dtype enable_autocast",
        "follows from policy.precision",
        remedy="set that key instead",
    ),
    *_fixed(
        "perform_initialization use_cpu_initialization init_model_with_meta_device transformer_impl "
        "variable_seq_lengths calculate_per_token_loss deallocate_pipeline_outputs seq_length parallel_output "
        "should_pad_vocab use_te_rng_tracker hidden_dropout attention_dropout cross_entropy_loss_fusion "
        "restore_modelopt_state",
        "is set by this package for the device it runs on",
    ),
    *_fixed(
        "fp8 fp8_quantizer_factory fp8_param fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention fp4 "
        "fp4_quantizer_factory fp4_param quant_recipe use_kitchen moe_router_padding_for_fp8 "
        "moe_router_padding_for_quantization optimizer.fp8_recipe optimizer.reuse_grad_buf_for_mxfp8_param_ag "
        "distributed_data_parallel_config.fp8_param_gather distributed_data_parallel_config.fp4_param_gather "
        "distributed_data_parallel_config.reuse_grad_buf_for_mxfp8_param_ag",
        "fp8 and fp4 are not supported here yet",
        _OFF,
        "delete it",
    ),
    *_fixed(
        "moe_layer_recompute",
        "is megatron-core's old name",
        _OFF,
        f"list moe in {MEGATRON}.recompute_modules, and delete it",
    ),
    *_fixed(
        "enable_cuda_graph external_cuda_graph cuda_graph_scope",
        "is megatron-core's old name",
        _OFF,
        f"list the modules in {MEGATRON}.cuda_graph_modules, set {MEGATRON}.cuda_graph_impl to transformer_engine, and "
        "delete it",
    ),
    *_fixed(
        "cuda_graph_impl",
        "only graphs of Transformer Engine are captured here: local graphs are captured outside the training step, and "
        "full_iteration graphs fix the number of micro-batches",
        ("none", "transformer_engine"),
        "use transformer_engine or none",
    ),
    *_fixed(
        "cp_comm_type",
        "this kind of context parallelism is not supported here",
        (None, "p2p", "a2a", "all_gather"),
        "use p2p, a2a or all_gather",
    ),
    # megatron-core reads overlap_dispatch_backward_with_experts_wgrad only with its FSDP, but Transformer Engine always
    # does: expert weights then get gradients before these are written. Buffers that are registered with NCCL (nccl_ub)
    # would take the memory twice, since the offloader moves them into memory of its own.
    *_fixed(
        "hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank tp_comm_overlap "
        "tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards inference_cuda_graph_scope "
        "overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release delay_wgrad_compute "
        "overlap_dispatch_backward_with_experts_wgrad defer_embedding_wgrad_compute moe_enable_routing_replay "
        "moe_paged_stash moe_expert_rank_capacity_factor num_microbatches_with_partial_activation_checkpoints "
        "heterogeneous_block_specs use_inference_optimized_layers test_mode optimizer.optimizer_cuda_graph "
        "optimizer.use_layer_wise_distributed_optimizer optimizer.overlap_param_gather_with_optimizer_step "
        "distributed_data_parallel_config.delay_wgrad_compute distributed_data_parallel_config.nccl_ub "
        "distributed_data_parallel_config.disable_symmetric_registration distributed_data_parallel_config.num_buckets",
        "is not supported here",
        _OFF,
        "delete it",
    ),
    *_fixed(
        "cpu_offloading cpu_offloading_num_layers",
        "megatron-core's layer-wise cpu_offloading is not supported here",
        (*_OFF, 0),
        f"leave it at {{off}} or delete the key, and use {MEGATRON}.fine_grained_activation_offloading",
    ),
    *_fixed(
        "mtp_num_layers mtp_enabled mtp_standalone mtp_hybrid_override_pattern",
        "multi-token prediction is not supported here",
        (*_OFF, 0),
        "delete it",
    ),
    *_fixed("optimizer.fp16", "float16 training is not supported here", (False,), "use bfloat16"),
    *_fixed(
        "optimizer.main_grads_dtype",
        "is not read by megatron-core 0.19.2",
        ("float32", None),
        f"leave it at {{off}}, and set the gradients' type with {DDP}.grad_reduce_in_fp32",
    ),
    *_fixed("optimizer.overlap_param_gather", f"is set in {DDP}"),
    *_fixed("distributed_data_parallel_config.use_distributed_optimizer", f"is set in {OPTIMIZER}"),
    *_fixed(
        "distributed_data_parallel_config.use_custom_fsdp distributed_data_parallel_config.use_megatron_fsdp",
        "Megatron-FSDP is not supported here",
        _OFF,
    ),
    *_fixed("distributed_data_parallel_config.average_in_collective", "gradients are summed over ranks here", _OFF),
)

_TE = "needs Transformer Engine on a GPU"
_GRAPHS = "needs CUDA graphs of Transformer Engine"

_OFF_ON_CPU = (
    *_off_on_cpu(
        "apply_rope_fusion fused_single_qkv_rope moe_permute_fusion moe_router_fusion use_te_activation_func "
        "use_transformer_engine_op_fuser fine_grained_activation_offloading optimizer.use_precision_aware_optimizer",
        _TE,
    ),
    *_off_on_cpu(
        "bias_activation_fusion bias_dropout_fusion gradient_accumulation_fusion masked_softmax_fusion "
        "persist_layer_norm moe_grouped_gemm moe_enable_deepep use_fused_weighted_squared_relu",
        "needs a GPU",
    ),
    *_off_on_cpu(
        "moe_shared_expert_overlap distributed_data_parallel_config.overlap_param_gather "
        "distributed_data_parallel_config.overlap_grad_reduce",
        "needs CUDA streams",
    ),
    *_off_on_cpu("delay_offload_until_cuda_graph", _GRAPHS),
    *_off_on_cpu("cuda_graph_impl", _GRAPHS, ("none", None)),
    *_off_on_cpu("optimizer.optimizer_cpu_offload", "needs a GPU; here the whole optimizer runs on the CPU"),
    *_off_on_cpu(
        "optimizer.main_grads_dtype optimizer.main_params_dtype optimizer.exp_avg_dtype optimizer.exp_avg_sq_dtype",
        "follows optimizer.use_precision_aware_optimizer, which " + _TE,
        ("float32", None),
    ),
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

# All fields that pass, by the test file or the reason: others are refused, unless policy.unchecked_megatron_fields is
# true.
_TESTED = {
    "config/test_cpu.py": "optimizer.exp_avg_dtype",
    "mcore/test_architectures.py": "moe_layer_freq",
    "mcore/test_aux_losses.py": "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff",
    "mcore/test_checkpoint.py": "distributed_data_parallel_config.bucket_size",
    "mcore/test_checkpoint_hyperparameters.py": "optimizer.decoupled_lr",
    "mcore/test_cuda_graphs.py": "fp32_residual_connection",
    "mcore/test_gpu_activations.py": "moe_grouped_gemm",
    "mcore/test_model_config.py": "attention_backend layernorm_epsilon microbatch_group_size_per_vp_stage "
    "moe_token_dispatcher_type rotary_interleaved",
    "mcore/test_router_losses.py": "moe_router_enable_expert_bias moe_router_bias_update_rate",
    "mcore/test_worker_step.py": "optimizer.grad_norm_skip_threshold optimizer.log_num_zeros_in_grad",
    "plan/test_model_facts.py": "distributed_data_parallel_config.param_name_patterns_for_fp32_local_accumulation",
    "plan/test_activations.py": "moe_expert_capacity_factor moe_pad_expert_input_to_capacity",
    "residency/streamed/test_like_fused_adam.py": "optimizer.store_param_remainders",
    "worker/test_environment.py": "use_transformer_engine_op_fuser",
}
_PLAIN = {
    "which sizes the model has": "add_bias_linear add_qkv_bias moe_ffn_hidden_size moe_router_topk qk_layernorm "
    "softmax_type",
    "how the router of a mixture of experts chooses": "moe_apply_probs_on_input moe_router_dtype moe_router_group_topk "
    "moe_router_num_groups moe_router_score_function moe_router_topk_scaling_factor",
    "which kernels compute, and on which stream": "bias_dropout_fusion fused_residual_rmsnorm fused_single_qkv_rope "
    "masked_softmax_fusion moe_router_fusion moe_shared_expert_overlap persist_layer_norm "
    "use_fused_weighted_squared_relu",
    "read with multi-token prediction, which is off": "mtp_detach_heads mtp_loss_scaling_factor mtp_use_repeated_layer",
    "read with Megatron-FSDP, which is off": "distributed_data_parallel_config.data_parallel_sharding_strategy",
    "which layers full recomputation takes at a time": "recompute_method recompute_num_layers",
    "which tokens attention sees": "window_size",
    "the end of the rate that decoupled_lr starts": "optimizer.decoupled_min_lr",
    "how weight_decay applies, and to what": "optimizer.apply_wd_to_qk_layernorm optimizer.decoupled_weight_decay",
    "which dtypes the optimizer's state has": "optimizer.exp_avg_sq_dtype optimizer.main_params_dtype",
}
_UNTESTED = {"needs DeepEP or HybridEP": "moe_enable_deepep moe_flex_dispatcher_backend moe_hybridep_num_sms"}
_PASSING = (
    *(row for file, names in _TESTED.items() for row in each(MEGATRON, names, Kind.TESTED, f"tests/unit/{file}")),
    *(row for why, names in _PLAIN.items() for row in each(MEGATRON, names, Kind.PLAIN, why)),
    *(row for why, names in _UNTESTED.items() for row in each(MEGATRON, names, Kind.UNTESTED, why)),
)

MEGATRON_ROWS: tuple[Row, ...] = (*_FIXED, *_OFF_ON_CPU, *_UNKNOWN_SIZES, *_PASSING)
