"""The section `policy.megatron_cfg` and what it holds: optimizer, scheduler, data parallelism, checkpoint format.

All but the scheduler and the checkpoint also take any field of the megatron-core config that they stand for
(config.megatron_fields); the keys below are those that this package reads itself or that every recipe has to state.
"""

from typing import Literal, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    STRICT_WITH_FURTHER_FIELDS,
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Precision,
)


@with_config(STRICT_WITH_FURTHER_FIELDS)
class MegatronOptimizerConfig(TypedDict):
    """Section `policy.megatron_cfg.optimizer`; takes any further field of megatron-core's OptimizerConfig."""

    # Algorithm: adam or sgd (adam decouples weight decay, so it is AdamW). Recommended: adam.
    optimizer: Literal["adam", "sgd"]
    # Peak learning rate, per step. Above 0; recommended 1e-6 to 1e-5 for RL on a pretrained model.
    lr: PositiveFloat
    # Learning rate at the end of the decay. 0 to lr; equal to lr with a constant schedule.
    min_lr: NonNegativeFloat
    # Decoupled weight decay, of matrices: biases and all other one-dimensional parameters, such as those of norms, get
    # none, unless apply_wd_to_qk_layernorm gives it to the norms of queries and keys. 0 or more; recommended 0.01.
    weight_decay: NonNegativeFloat
    # Whether parameters are bfloat16. True exactly when policy.precision is bfloat16.
    bf16: bool
    # Whether parameters are float16. Only false: float16 training is not supported here.
    fp16: bool
    # Type of the optimizer's own parameters: float32 or bfloat16. Recommended: float32.
    params_dtype: Precision
    # Adam's decay of the first moment, read only with `optimizer: adam`. 0 to below 1; recommended 0.9.
    adam_beta1: Decay
    # Adam's decay of the second moment, read only with `optimizer: adam`. 0 to below 1; recommended 0.999 (0.98 for
    # short runs).
    adam_beta2: Decay
    # Added to Adam's denominator, read only with `optimizer: adam`. Above 0, in float32 too; recommended 1e-8.
    adam_eps: PositiveFloat
    # Momentum of sgd, read only with `optimizer: sgd`. 0 to below 1; recommended 0.9.
    sgd_momentum: Decay
    # Shard optimizer state over the data-parallel ranks. Recommended: true.
    use_distributed_optimizer: bool
    # Keep optimizer state and gradients in the types that Transformer Engine's Adam is given; needs a GPU and the
    # distributed optimizer, and is switched off on a CPU. Recommended: true on GPUs.
    use_precision_aware_optimizer: bool
    # Largest norm of the gradient; larger ones are scaled down to it, 0 clips nothing. Recommended:
    # "${policy.max_grad_norm}".
    clip_grad: NonNegativeFloat
    # Keep gradients, masters and moments of a share of the parameters in host memory and step them on the CPU, slower
    # (docs/optimizer-offload.md). Needs the distributed optimizer and a GPU, switched off on a CPU. Recommended: false
    # while optimizer state fits on the GPU in training. Absent: false.
    optimizer_cpu_offload: NotRequired[bool]
    # Share of the parameters that is stepped on the CPU, at most; read only with optimizer_cpu_offload. Above 0 there,
    # up to 1; recommended 1.0, less where the rest fits on the GPU. Absent: 0, which optimizer_cpu_offload refuses.
    optimizer_offload_fraction: NotRequired[Fraction]
    # Copy gradients and parameters of the CPU optimizer in parts, beside its steps on other parts. Only false without
    # optimizer_cpu_offload; recommended true with it. Absent: false.
    overlap_cpu_optimizer_d2h_h2d: NotRequired[bool]


@with_config(STRICT)
class MegatronSchedulerConfig(TypedDict):
    """Section `policy.megatron_cfg.scheduler`: learning rate and weight decay over optimizer steps."""

    # Weight decay at the first step. 0 or more; recommended "${policy.megatron_cfg.optimizer.weight_decay}".
    start_weight_decay: NonNegativeFloat
    # Weight decay at the last step. 0 or more; recommended "${policy.megatron_cfg.optimizer.weight_decay}".
    end_weight_decay: NonNegativeFloat
    # How weight decay goes from start to end: constant, linear or cosine. Recommended: constant.
    weight_decay_incr_style: Literal["constant", "linear", "cosine"]
    # How the learning rate falls after the warm-up: constant, linear, cosine or inverse-square-root.
    # Recommended: constant for RL, cosine for SFT.
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"]
    # Optimizer steps until the learning rate has reached min_lr, warm-up included; null is the run's own number of
    # steps. Absent: as null.
    lr_decay_iters: NotRequired[PositiveInt | None]
    # Optimizer steps of linear warm-up from lr_warmup_init to lr. 0 or more; recommended 1 to 5% of the run.
    lr_warmup_iters: NonNegativeInt
    # Learning rate at the start of the warm-up. 0 to lr; recommended a tenth of lr.
    lr_warmup_init: NonNegativeFloat


@with_config(STRICT_WITH_FURTHER_FIELDS)
class MegatronDDPConfig(TypedDict):
    """Section `policy.megatron_cfg.distributed_data_parallel_config`.

    Takes any further field of megatron-core's DistributedDataParallelConfig.
    """

    # Sum gradients over ranks in float32. Costs twice the gradient memory of bfloat16; recommended false for short
    # runs, true for long ones.
    grad_reduce_in_fp32: bool
    # Reduce gradients while the backward pass still runs. Recommended: true.
    overlap_grad_reduce: bool
    # Gather updated parameters while the next forward pass already runs; needs the distributed optimizer and
    # overlap_grad_reduce. Recommended: true.
    overlap_param_gather: bool


@with_config(STRICT)
class MegatronCheckpointConfig(TypedDict):
    """Section `policy.megatron_cfg.checkpoint`: how checkpoints are written."""

    # Write checkpoints while training goes on, from a copy in host memory of the state of their step. Takes host memory
    # for the weights and for what of the optimizer is not offloaded anyway. Recommended: true. Absent: false.
    async_save: NotRequired[bool]
    # Reuse the plan of the last checkpoint, what goes into which file, where names, shapes and types are those of then
    # on every rank; the values are always those of now. Recommended: false; true saves planning time with thousands
    # of tensors on many ranks. Absent: false.
    ckpt_assume_constant_structure: NotRequired[bool]
    # Save optimizer state in the format that loads at any parallel size. Only false: megatron-core 0.19.2 restores
    # wrong values from it when a model has several gradient buckets. Absent: false.
    dist_ckpt_optim_fully_reshardable: NotRequired[bool]


@with_config(STRICT_WITH_FURTHER_FIELDS)
class MegatronConfig(TypedDict):
    """Section `policy.megatron_cfg`; takes any further field of megatron-core's TransformerConfig."""

    # Train with Megatron. Only true: it is the one policy backend here.
    enabled: Literal[True]
    # Ranks that share each layer. 1 or more; recommended 1 until a layer no longer fits one GPU.
    tensor_model_parallel_size: PositiveInt
    # Ranks that the layers are dealt out to. 1 or more; recommended 1 until the model no longer fits one node.
    pipeline_model_parallel_size: PositiveInt
    # Ranks that share a sequence. Only 1: not supported here yet.
    context_parallel_size: PositiveInt
    # Ranks that the experts of a mixture-of-experts model are dealt out to. 1 or more; 1 for dense models.
    expert_model_parallel_size: PositiveInt
    # Ranks that share each expert. 1 or more; recommended 1.
    expert_tensor_parallel_size: PositiveInt
    # Layer chunks of a pipeline stage (interleaved schedule). 2 or more with pipeline parallelism; null for none.
    # Absent: as null.
    virtual_pipeline_model_parallel_size: NotRequired[PositiveInt | None]
    # Split the sequence over tensor-parallel ranks outside attention and MLP. Counts only with
    # tensor_model_parallel_size above 1; recommended true there on GPUs.
    sequence_parallel: bool
    # Type of what pipeline stages send each other: bfloat16 or float32. Recommended: "${policy.precision}".
    pipeline_dtype: Precision
    # Layers of the first pipeline stage where it differs from the rest; null for an even split.
    num_layers_in_first_pipeline_stage: PositiveInt | None
    # Layers of the last pipeline stage where it differs from the rest; null for an even split.
    num_layers_in_last_pipeline_stage: PositiveInt | None
    # Recompute activations in the backward pass instead of keeping them. Saves most of their memory for about a third
    # more compute; recommended false while they fit.
    activation_checkpointing: bool
    # What is recomputed, counts only with activation_checkpointing: full (whole layers) or selective
    # (recompute_modules). Recommended: full.
    recompute_granularity: Literal["full", "selective"] | None
    # Modules recomputed with selective granularity: core_attn, moe_act, layernorm, mla_up_proj, mlp, moe,
    # shared_experts; null for megatron-core's default, core_attn.
    recompute_modules: list[str] | None
    # Move the activations of offload_modules to page-locked host memory between their forward and backward pass; not
    # in log-probs and validation. Needs Transformer Engine on a GPU, switched off on a CPU; not the CPU optimizer
    # (optimizer_cpu_offload). Recommended: false while they fit.
    fine_grained_activation_offloading: bool
    # Parts of a layer whose activations move, read only with fine_grained_activation_offloading: attn_norm, qkv_linear,
    # core_attn, attn_proj (with core_attn), mlp_norm; of a mixture of experts also expert_fc1 and moe_act, or
    # fused_group_mlp (with use_transformer_engine_op_fuser). Null while that is false. Recommended: [qkv_linear,
    # core_attn, attn_proj] for dense models, [moe_act, expert_fc1] for mixtures of experts.
    offload_modules: list[str] | None
    # Share of the eligible bytes of a micro-batch that move, at most; what stays is spread over the layers. 0 to 1;
    # recommended 1.0, less where the link is the limit. Absent: 1.0.
    activation_offload_fraction: NotRequired[Fraction]
    # Smallest tensor that moves, in elements (not bytes). 0 or more; recommended 1048576, 0 for tiny models in tests.
    # Absent: 1048576.
    min_offloaded_tensor_size: NotRequired[NonNegativeInt]
    # Bytes that each pipeline stage moves less than the one before it, which holds more micro-batches at a time. 0 or
    # more; recommended 0. Absent: 0.
    delta_offload_bytes_across_pp_ranks: NotRequired[NonNegativeInt]
    # Hold copies of experts back until the next graph has been replayed, when the CPU is idle; no effect on a dense
    # model. Needs cuda_graph_impl transformer_engine. Recommended: false. Absent: false.
    delay_offload_until_cuda_graph: NotRequired[bool]
    # Groups (a module's activations in one layer) that may be on their way to the host before computation waits for the
    # oldest: 0 waits for each, null is as many as a layer has, or two where not all layers leave alike, as with a
    # fraction. 0 or more; recommended null. Absent: as null.
    fine_grained_offloading_max_inflight_offloads: NotRequired[NonNegativeInt | None]
    # What captures parts of training's layers as CUDA graphs: none, or transformer_engine (local and full_iteration are
    # refused). Needs Transformer Engine on a GPU, switched off on a CPU. Recommended: none; transformer_engine for
    # mixtures of experts where the CPU cannot launch kernels fast enough.
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"]
    # Parts of a layer that are captured, read only with cuda_graph_impl other than none: attn; mlp of dense layers;
    # moe_router and, beside it, moe_preprocess of a mixture of experts. With attn or mlp rows are padded to
    # policy.max_total_sequence_length, which with attn is a multiple of 128, and not packed. Recommended: [] while off,
    # then [attn] for dense models, [attn, moe_router] for mixtures of experts, [moe_router] for those with packed rows.
    cuda_graph_modules: list[str]
    # Training steps before the capture; read only with cuda_graph_impl other than none. 1 or more there; recommended 3.
    cuda_graph_warmup_steps: NonNegativeInt
    # When the memory that torch's allocator keeps goes back to CUDA: 0 where generation needs it, which residency sees
    # to; 1 before each optimizer step, too; 2 also behind it. Recommended: 0; 1 or 2 against fragmentation.
    empty_unused_memory_level: Literal[0, 1, 2]
    # Do not train the routers of a mixture-of-experts model (nothing on a dense one). Recommended for RL: true.
    freeze_moe_router: bool
    # Fuse rotary embeddings into one kernel; needs Transformer Engine, switched off on a CPU. Recommended: true.
    # Absent: what Megatron-Bridge sets for the model.
    apply_rope_fusion: NotRequired[bool]
    # Fuse bias and activation of the MLP; switched off on a CPU. Recommended: true.
    # Absent: what Megatron-Bridge sets for the model.
    bias_activation_fusion: NotRequired[bool]
    # Accumulate weight gradients inside the matrix product; needs a GPU kernel, switched off on a CPU.
    # Recommended: false. Absent: on where the kernel is installed.
    gradient_accumulation_fusion: NotRequired[bool]
    # Compute the logits of fused_linear_logprobs_chunk_size tokens at a time, and again in the backward pass, so that
    # those of a micro-batch are never in memory at once. Recommended: true where they take the memory that is missing.
    # Absent: false.
    use_fused_linear_logprobs: NotRequired[bool]
    # Tokens of a micro-batch whose logits are in memory at a time, read only with use_fused_linear_logprobs. 1 or more;
    # recommended 1024, less where that memory is missing, too. Absent: 256.
    fused_linear_logprobs_chunk_size: NotRequired[PositiveInt]
    # Fuse the permutation of tokens to experts; needs Transformer Engine, switched off on a CPU. Recommended: true.
    # Absent: what Megatron-Bridge sets for the model.
    moe_permute_fusion: NotRequired[bool]
    # Environment variables of the policy workers, set before they import anything; null or {} for none.
    # Absent: none.
    env_vars: NotRequired[dict[str, str] | None]
    # The optimizer.
    optimizer: MegatronOptimizerConfig
    # Learning rate and weight decay over the run.
    scheduler: MegatronSchedulerConfig
    # Data parallelism.
    distributed_data_parallel_config: MegatronDDPConfig
    # How checkpoints are written. Absent: each is planned anew and written at once.
    checkpoint: NotRequired[MegatronCheckpointConfig]
