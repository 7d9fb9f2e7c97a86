"""The section `policy.megatron_cfg` and its sub-sections: optimizer, scheduler, data parallelism, checkpoint format.

All but the scheduler and the checkpoint section also accept fields of the corresponding megatron-core config
(config.key_table.megatron). The keys below are those that this package reads itself or that every recipe
must set.
"""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    STRICT_WITH_FURTHER_FIELDS,
    Decay,
    Fraction,
    IfAbsent,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Precision,
    RowTokens,
)


@with_config(STRICT_WITH_FURTHER_FIELDS)
class MegatronOptimizerConfig(TypedDict):
    """Section `policy.megatron_cfg.optimizer`; accepts further fields of megatron-core's OptimizerConfig."""

    # Algorithm: adam or sgd (adam decouples weight decay, so it is AdamW). Recommended: adam.
    optimizer: Literal["adam", "sgd"]
    # Peak learning rate, per step. Above 0; recommended 1e-6 to 1e-5 for RL on a pretrained model.
    lr: PositiveFloat
    # Learning rate at the end of the decay. 0 to lr; equal to lr with a constant schedule.
    min_lr: NonNegativeFloat
    # Decoupled weight decay of matrices. Biases and other one-dimensional parameters, such as those of norms, get none,
    # except that apply_wd_to_qk_layernorm adds the norms of queries and keys. 0 or more; recommended 0.01.
    weight_decay: NonNegativeFloat
    # Whether parameters are bfloat16. Must be true exactly when policy.precision is bfloat16.
    bf16: bool
    # Whether parameters are float16. Must be false: float16 training is not supported.
    fp16: bool
    # Dtype of the optimizer's own parameters: float32 or bfloat16. Recommended: float32.
    params_dtype: Precision
    # Adam's decay of the first moment; read only with `optimizer: adam`. 0 to below 1; recommended 0.9.
    adam_beta1: Decay
    # Adam's decay of the second moment; read only with `optimizer: adam`. 0 to below 1; recommended 0.999 (0.98 for
    # short runs).
    adam_beta2: Decay
    # Added to Adam's denominator; read only with `optimizer: adam`. Above 0, also when rounded to float32; recommended
    # 1e-8.
    adam_eps: PositiveFloat
    # Momentum of sgd; read only with `optimizer: sgd`. 0 to below 1; recommended 0.9.
    sgd_momentum: Decay
    # Shard optimizer state over the data-parallel ranks. Recommended: true.
    use_distributed_optimizer: bool
    # Keep optimizer state and gradients in the dtypes that Transformer Engine's Adam is configured with; needs a GPU
    # and the distributed optimizer, and is switched off on a CPU. Recommended: true on GPUs.
    use_precision_aware_optimizer: bool
    # Largest gradient norm; larger gradients are scaled down to it, and 0 disables clipping. Recommended:
    # "${policy.max_grad_norm}".
    clip_grad: NonNegativeFloat
    # Keep gradients, master weights and moments of a share of the parameters in host memory and run their optimizer
    # step on the CPU, which is slower (docs/optimizer-offload.md). Needs the distributed optimizer and a GPU, switched
    # off on a CPU. Recommended: false while optimizer state fits on the GPU in training.
    optimizer_cpu_offload: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Largest share of the parameters whose optimizer step runs on the CPU; read only with optimizer_cpu_offload. Above
    # 0 there, up to 1; recommended 1.0, less where the rest fits on the GPU.
    optimizer_offload_fraction: NotRequired[Annotated[Fraction, IfAbsent(0.0)]]
    # Copy the CPU optimizer's gradients and parameters in parts, overlapped with its steps on other parts. Must be
    # false without optimizer_cpu_offload; recommended true with it.
    overlap_cpu_optimizer_d2h_h2d: NotRequired[Annotated[bool, IfAbsent(False)]]


@with_config(STRICT)
class MegatronSchedulerConfig(TypedDict):
    """Section `policy.megatron_cfg.scheduler`: learning rate and weight decay over optimizer steps."""

    # Weight decay at the first step. 0 or more; recommended "${policy.megatron_cfg.optimizer.weight_decay}".
    start_weight_decay: NonNegativeFloat
    # Weight decay at the end of the run. 0 or more; recommended "${policy.megatron_cfg.optimizer.weight_decay}".
    end_weight_decay: NonNegativeFloat
    # How weight decay changes from start to end: constant, linear or cosine. Recommended: constant.
    weight_decay_incr_style: Literal["constant", "linear", "cosine"]
    # How the learning rate decreases after the warm-up: constant, linear, cosine or inverse-square-root. Recommended:
    # constant for RL, cosine for SFT.
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"]
    # Training steps until the learning rate reaches min_lr, including the warm-up. The schedule moves once a training
    # step, as in NeMo-RL, also if that has several optimizer steps (policy.train_global_batch_size below the samples of
    # a step). Null: the run's own number, which is max_num_steps, or the steps of max_num_epochs if these are fewer.
    lr_decay_iters: NotRequired[Annotated[PositiveInt | None, IfAbsent(None)]]
    # Training steps of linear warm-up from lr_warmup_init to lr; a shorter run with lr_decay_iters null warms up until
    # its end. 0 or more; recommended 1 to 5% of the run.
    lr_warmup_iters: NonNegativeInt
    # Learning rate at the start of the warm-up. 0 to lr; recommended a tenth of lr.
    lr_warmup_init: NonNegativeFloat
    # Whether a resumed run follows the recipe's schedule if the checkpoint's differs, instead of refusing the
    # checkpoint. The number of steps taken is the checkpoint's. Recommended: true, so that a run can be extended.
    # NeMo-RL's own default is false.
    override_opt_param_scheduler: NotRequired[Annotated[bool, IfAbsent(True)]]


@with_config(STRICT_WITH_FURTHER_FIELDS)
class MegatronDDPConfig(TypedDict):
    """Section `policy.megatron_cfg.distributed_data_parallel_config`.

    Accepts further fields of megatron-core's DistributedDataParallelConfig.
    """

    # Reduce gradients over ranks in float32. Takes twice the gradient memory of bfloat16; recommended false for short
    # runs, true for long ones.
    grad_reduce_in_fp32: bool
    # Overlap the gradient reduction with the backward pass. Recommended: true.
    overlap_grad_reduce: bool
    # Overlap the gathering of updated parameters with the next forward pass; needs the distributed optimizer and
    # overlap_grad_reduce. Recommended: true.
    overlap_param_gather: bool


@with_config(STRICT)
class MegatronCheckpointConfig(TypedDict):
    """Section `policy.megatron_cfg.checkpoint`: how checkpoints are written."""

    # Write checkpoints in the background while training continues, from a host-memory copy of the state of their step.
    # With streamed optimizer state the next training step waits until the files are written. Takes host memory for the
    # weights and for the optimizer state that is not offloaded anyway. Recommended: true.
    async_save: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Reuse the last checkpoint's plan of what goes into which file, if names, shapes and dtypes are unchanged on every
    # rank; the values are always the current ones. Recommended: false; true saves planning time with thousands of
    # tensors on many ranks.
    ckpt_assume_constant_structure: NotRequired[Annotated[bool, IfAbsent(False)]]


@with_config(STRICT_WITH_FURTHER_FIELDS)
class MegatronConfig(TypedDict):
    """Section `policy.megatron_cfg`; accepts further fields of megatron-core's TransformerConfig."""

    # Train with Megatron. Must be true: it is the only policy backend.
    enabled: Literal[True]
    # Number of ranks that share each layer. 1 or more; recommended 1 until a layer no longer fits one GPU.
    tensor_model_parallel_size: PositiveInt
    # Number of pipeline stages that the layers are divided among. 1 or more; recommended 1 until the model no longer
    # fits one node.
    pipeline_model_parallel_size: PositiveInt
    # Number of ranks that share each sequence. 1 or more; recommended 1 until a row no longer fits one GPU, or takes
    # too long there. `cp_comm_type` says how attention exchanges keys and values: p2p (if absent), a2a or all_gather.
    context_parallel_size: PositiveInt
    # Number of ranks that the experts of a mixture-of-experts model are divided among. 1 or more; 1 for dense models.
    expert_model_parallel_size: PositiveInt
    # Number of ranks that share each expert. 1 or more; recommended 1.
    expert_tensor_parallel_size: PositiveInt
    # Layer chunks of each pipeline stage (interleaved schedule). 2 or more with pipeline parallelism; null for none.
    virtual_pipeline_model_parallel_size: NotRequired[Annotated[PositiveInt | None, IfAbsent(None)]]
    # Split the sequence over tensor-parallel ranks outside attention and MLP. Takes effect only with
    # tensor_model_parallel_size above 1; recommended true there on GPUs.
    sequence_parallel: bool
    # Dtype of the tensors that pipeline stages send each other: bfloat16 or float32. Recommended:
    # "${policy.precision}".
    pipeline_dtype: Precision
    # Number of layers of the first pipeline stage if it differs from the others; null for an even split.
    num_layers_in_first_pipeline_stage: PositiveInt | None
    # Number of layers of the last pipeline stage if it differs from the others; null for an even split.
    num_layers_in_last_pipeline_stage: PositiveInt | None
    # Recompute activations in the backward pass instead of saving them. Saves most of their memory for about a third
    # more compute; recommended false while they fit.
    activation_checkpointing: bool
    # What is recomputed; takes effect only with activation_checkpointing: full (whole layers) or selective
    # (recompute_modules). Recommended: full.
    recompute_granularity: NotRequired[Annotated[Literal["full", "selective"] | None, IfAbsent("full")]]
    # Modules recomputed with selective granularity: core_attn, moe_act, layernorm, mla_up_proj, mlp, moe,
    # shared_experts; null for megatron-core's default, core_attn.
    recompute_modules: NotRequired[Annotated[list[str] | None, IfAbsent(None)]]
    # Compute the MLPs of a dense model this many tokens of a micro-batch at a time, and again in the backward pass, so
    # that a layer's MLP saves only its input, and the intermediates of a whole micro-batch are never in memory at once,
    # also with recompute_granularity full. 1 or more; auto: 16,384, or the hidden size if that is larger, since smaller
    # tiles spend more time on adding up gradients; null: all tokens at once, and saved. Recommended: auto if long rows
    # run out of memory without it.
    mlp_tile_tokens: NotRequired[Annotated[RowTokens | None, IfAbsent(None)]]
    # Offload the activations of offload_modules to pinned host memory between their forward and backward pass; not in
    # log-prob passes and validation. Needs Transformer Engine on a GPU, switched off on a CPU; cannot be combined with
    # the CPU optimizer (optimizer_cpu_offload). Recommended: false while they fit.
    fine_grained_activation_offloading: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Parts of a layer whose activations are offloaded; read only with fine_grained_activation_offloading: attn_norm,
    # qkv_linear, core_attn, attn_proj (with core_attn), mlp_norm; for a mixture of experts also expert_fc1 and moe_act,
    # or fused_group_mlp (with use_transformer_engine_op_fuser). With full recomputation (recompute_granularity)
    # instead: layer_input, the input of each recomputed segment of recompute_num_layers layers, alone or with
    # core_attn, whose attention is then not recomputed. May be null while fine_grained_activation_offloading is false.
    # Recommended: [qkv_linear, core_attn, attn_proj] for dense models, [moe_act, expert_fc1] for mixtures of experts,
    # [layer_input, core_attn] for rows that do not fit otherwise, [layer_input] where the host is too small for that.
    offload_modules: NotRequired[Annotated[list[str] | None, IfAbsent(None)]]
    # Largest share of a micro-batch's eligible bytes that is offloaded; the bytes that stay are spread over the layers.
    # 0 to 1; recommended 1.0, less where the link is the bottleneck.
    activation_offload_fraction: NotRequired[Annotated[Fraction, IfAbsent(1.0)]]
    # Smallest tensor that is offloaded, in elements (not bytes). 0 or more; recommended 1048576, 0 for tiny models in
    # tests.
    min_offloaded_tensor_size: NotRequired[Annotated[NonNegativeInt, IfAbsent(1048576)]]
    # Number of bytes by which each pipeline stage offloads less than the stage before it, which holds more
    # micro-batches at a time. 0 or more; recommended 0.
    delta_offload_bytes_across_pp_ranks: NotRequired[Annotated[NonNegativeInt, IfAbsent(0)]]
    # Delay the offload copies of experts until the next graph has been replayed, when the CPU is idle; no effect on a
    # dense model. Needs cuda_graph_impl transformer_engine. Recommended: false.
    delay_offload_until_cuda_graph: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Groups (a module's activations in one layer) whose copies to the host may be in flight before computation waits
    # for the oldest: 0 waits for each, null is as many as a layer has, or two where not all layers offload the same
    # groups, as with a fraction. 0 or more; recommended null.
    fine_grained_offloading_max_inflight_offloads: NotRequired[Annotated[NonNegativeInt | None, IfAbsent(None)]]
    # Which implementation captures parts of the layers as CUDA graphs in training: none, or transformer_engine (local
    # and full_iteration are rejected). Needs Transformer Engine on a GPU, switched off on a CPU. Recommended: none;
    # transformer_engine for mixtures of experts where the CPU cannot launch kernels fast enough.
    cuda_graph_impl: NotRequired[
        Annotated[Literal["none", "local", "transformer_engine", "full_iteration"], IfAbsent("none")]
    ]
    # Parts of a layer that are captured; read only with cuda_graph_impl other than none: attn; mlp of dense layers;
    # moe_router and, with it, moe_preprocess of a mixture of experts. With attn or mlp, rows are padded to
    # policy.max_total_sequence_length, which with attn must be a multiple of 128, and are not packed. Recommended: []
    # while off, otherwise [attn] for dense models, [attn, moe_router] for mixtures of experts, [moe_router] for those
    # with packed rows.
    cuda_graph_modules: NotRequired[Annotated[list[str], IfAbsent([])]]
    # Number of training steps before the capture; read only with cuda_graph_impl other than none. 1 or more;
    # recommended 3.
    cuda_graph_warmup_steps: NotRequired[Annotated[PositiveInt, IfAbsent(3)]]
    # When torch's allocator returns its cached memory to CUDA: 0 when generation needs it, which residency takes care
    # of; 1 also before each optimizer step; 2 also after it. Recommended: 0; 1 or 2 against fragmentation.
    empty_unused_memory_level: Literal[0, 1, 2]
    # Do not train the routers of a mixture-of-experts model (no effect on a dense one). Recommended for RL: true.
    freeze_moe_router: bool
    # Parts of a model with a vision or sound tower that are not trained. Has no effect on a text-only model, as in
    # NeMo-RL; a model with a tower is refused. Null or {} for none.
    freeze_config: NotRequired[Annotated[dict[str, Any] | None, IfAbsent(None)]]
    # Fuse rotary embeddings into one kernel; needs Transformer Engine, switched off on a CPU. Recommended: true.
    # Absent: what Megatron-Bridge sets for the model.
    apply_rope_fusion: NotRequired[bool]
    # Fuse the bias and the activation of the MLP; switched off on a CPU. Recommended: true. Absent: what
    # Megatron-Bridge sets for the model.
    bias_activation_fusion: NotRequired[bool]
    # Accumulate weight gradients inside the matrix product; needs a GPU kernel, switched off on a CPU.
    # Recommended: false. Absent: on where the kernel is installed.
    gradient_accumulation_fusion: NotRequired[bool]
    # Compute the logits of fused_linear_logprobs_chunk_size tokens at a time, and recompute them in the backward pass,
    # so that the logits of a whole micro-batch are never in memory at once. Recommended: true if training runs out of
    # memory without it.
    use_fused_linear_logprobs: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Number of tokens of a micro-batch whose logits are in memory at a time; read only with use_fused_linear_logprobs.
    # 1 or more; recommended 1024, less if that still takes too much memory.
    fused_linear_logprobs_chunk_size: NotRequired[Annotated[PositiveInt, IfAbsent(256)]]
    # Fuse the permutation of tokens to experts; needs Transformer Engine, switched off on a CPU. Recommended: true.
    # Absent: what Megatron-Bridge sets for the model.
    moe_permute_fusion: NotRequired[bool]
    # Also log the auxiliary losses of experts (moe_aux_loss_coeff, moe_z_loss_coeff) of each layer. Recommended: false.
    moe_per_layer_logging: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Fields of the model that have no key of their own in this section, as in NeMo-RL. They mean the same as in the
    # section itself and are checked as there, but must not be null. Null or {} for none. Absent: none.
    model_overrides: NotRequired[dict[str, Any] | None]
    # Environment variables of the policy workers, set before the workers import anything; null or {} for none. Without
    # PYTORCH_CUDA_ALLOC_CONF, workers let the segments of torch's allocator grow (docs/gpus.md). Recommended: null.
    env_vars: NotRequired[Annotated[dict[str, str] | None, IfAbsent(None)]]
    # The optimizer.
    optimizer: MegatronOptimizerConfig
    # Learning rate and weight decay over the run.
    scheduler: MegatronSchedulerConfig
    # Data parallelism.
    distributed_data_parallel_config: MegatronDDPConfig
    # How checkpoints are written. Absent: each checkpoint is planned anew and written synchronously.
    checkpoint: NotRequired[Annotated[MegatronCheckpointConfig, IfAbsent({})]]
