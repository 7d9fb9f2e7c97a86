"""The section `policy`: the model that is trained, and how."""

from typing import Any, Literal, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.activation_offload import ActivationOffloadConfig
from nemo_offload_rl.config.schema.generation import GenerationConfig
from nemo_offload_rl.config.schema.hf_config import HfConfigFields
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.residency import ResidencyOrAuto
from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    NumaSetting,
    PositiveFloat,
    PositiveInt,
    Precision,
    RowTokens,
)


@with_config(STRICT)
class TokenizerConfig(TypedDict):
    """Section `policy.tokenizer`."""

    # A folder, a hub name, or `arithmetic` for the built-in tokenizer of the arithmetic task.
    # Recommended: "${policy.model_name}".
    name: NonEmptyStr
    # Jinja template that turns messages into a prompt; null gives the plain text, unwrapped.
    # Absent: the tokenizer's own template where it has one, else the plain text.
    chat_template: NotRequired[str | None]
    # Further arguments of the template, such as {enable_thinking: false}; null for none. Absent: none.
    chat_template_kwargs: NotRequired[dict[str, Any] | None]


@with_config(STRICT)
class SequencePackingConfig(TypedDict):
    """Section `policy.sequence_packing`: several samples in one row, without padding between them."""

    # Pack micro-batches. Needs Transformer Engine; on a CPU batches are padded instead. Recommended: true on GPUs.
    enabled: bool
    # Most tokens of a packed row while training: a number, or auto for as many as the plan has room for on the GPU, up
    # to 32,768; where the GPU's memory or the model's sizes are not known, auto is max_total_sequence_length x
    # train_micro_batch_size (of pairs twice that). Recommended: auto. Absent: enabled is false.
    train_mb_tokens: NotRequired[RowTokens]
    # Most tokens of a packed row of a log-prob pass: a number, or auto likewise, with logprob_batch_size where there is
    # one. Recommended: auto. Absent: enabled is false, or the algorithm has no log-prob pass.
    logprob_mb_tokens: NotRequired[RowTokens]
    # How samples are dealt out to rows: modified_first_fit_decreasing; or modified_ffd, as recipes of NeMo-RL
    # have it, where enabled is false. Absent: enabled is false.
    algorithm: NotRequired[Literal["modified_first_fit_decreasing", "modified_ffd"]]
    # A packed row's length is rounded up to a multiple of this many tokens. 1 or more; recommended 64.
    # Absent: enabled is false.
    sequence_length_round: NotRequired[PositiveInt]


@with_config(STRICT)
class PolicyConfig(TypedDict):
    """Section `policy`, as every algorithm needs it."""

    # The model: a folder in Hugging Face format or a hub name; only a label where hf_config is given.
    model_name: NonEmptyStr
    # A Hugging Face config as a mapping (model_type, hidden_size ...), from which a model with random weights is built.
    # Null or absent: the model's own config and weights, from model_name.
    hf_config: NotRequired[HfConfigFields | None]
    # Train a model that the check against transformers refuses, or that it cannot compute: the check compares a small
    # twin of it with the same flags, and is not done. Recommended: false. Absent: false.
    skip_model_check: NotRequired[bool]
    # Fields of the Hugging Face config that are set anew, such as {rope_theta: 1000000}. Absent: none.
    hf_config_overrides: NotRequired[HfConfigFields]
    # The tokenizer.
    tokenizer: TokenizerConfig
    # Type of parameters and activations: bfloat16 or float32. Recommended: bfloat16 on GPUs, float32 on a CPU.
    precision: Precision
    # Most tokens of a prompt with its answer. 1 or more; as long as the task needs, since memory follows it. A multiple
    # of 128 where megatron_cfg.cuda_graph_modules captures attn.
    max_total_sequence_length: PositiveInt
    # Padded lengths are rounded up to a multiple of this. Recommended:
    # "${policy.megatron_cfg.tensor_model_parallel_size}", which sequence parallelism needs.
    make_sequence_length_divisible_by: PositiveInt
    # Samples of one optimizer step, over all ranks. A multiple of data-parallel size x train_micro_batch_size.
    train_global_batch_size: PositiveInt
    # Samples of one forward and backward pass on one rank. 1 or more; as large as memory allows.
    train_micro_batch_size: PositiveInt
    # Largest norm of the gradient, for megatron_cfg.optimizer.clip_grad to refer to; 0 clips nothing.
    # Recommended: 1.0; null where clip_grad is a number of its own.
    max_grad_norm: NonNegativeFloat | None
    # Steps whose loss or gradient is not finite that a run may skip before it stops. 0 or more; recommended 10.
    # Absent: 0, the first one stops the run.
    max_skipped_steps: NotRequired[NonNegativeInt]
    # Megatron: parallelism, optimizer, memory.
    megatron_cfg: MegatronConfig
    # Packing of micro-batches.
    sequence_packing: SequencePackingConfig
    # Memory in which weights go to generation, in GiB, taken for the time of a refit. Above 0; recommended 1.0. On GPUs
    # that policy and engine share it is there once, its halves taking turns; for an engine on GPUs of its own it is the
    # size of a piece, on both sides. Absent: 1.0.
    refit_buffer_size_gb: NotRequired[PositiveFloat]
    # Compare a checksum of the weights on both sides after every refit. Recommended: true in tests. Absent: false.
    verify_refit: NotRequired[bool]
    # Compute log-probs apart from training (GRPO, DPO) from the logits of this many tokens at a time, so that those of
    # a micro-batch are never in memory at once; null: as training does (megatron_cfg.use_fused_linear_logprobs). 1 or
    # more; recommended 1024 where logits take the memory that is missing. Absent: as null.
    logprob_chunk_size: NotRequired[PositiveInt | None]
    # Move optimizer state to the host before weights are sent to generation, until the next training step needs it.
    # null: beside vLLM only where the plan finds no room for it on the GPU; with transformers, true. Recommended: null.
    # Absent: null.
    offload_optimizer_for_refit: NotRequired[bool | None]
    # Move optimizer state to the host during log-prob passes, too. Recommended: false; true where their activations
    # need the room. Absent: false, it stays where it is.
    offload_optimizer_for_logprob: NotRequired[bool]
    # Page-lock the host memory of optimizer state, so that it is copied at the speed of the link. False: its copies go
    # through a small page-locked buffer, at the speed of the CPU's own copying; a remedy where so much memory cannot be
    # page-locked. Recommended: true. Absent: true.
    use_pinned_optimizer_offload: NotRequired[bool]
    # Where training state lives in each phase, and its host memory. auto: every key of the section as where it is
    # absent, and the cells of its table that may be auto set to that. Recommended: the section, or auto. Absent: what
    # the flags above say, no limit, no checksums, huge pages.
    residency: NotRequired[ResidencyOrAuto]
    # How strict activation offloading (megatron_cfg.fine_grained_activation_offloading) is, and its host memory.
    # Absent: not strict, as much host memory as the plan says.
    activation_offload: NotRequired[ActivationOffloadConfig]
    # The NUMA node that a rank's CPU threads and host memory are bound to: auto (that of its GPU), none, or the number
    # of a node. Recommended: auto. Absent: auto.
    numa: NotRequired[NumaSetting]


@with_config(STRICT)
class GRPOPolicyConfig(PolicyConfig):
    """Section `policy` of a GRPO recipe: with generation."""

    # Samples of one forward pass on one rank where only log-probs are wanted. 1 or more; recommended
    # "${policy.train_micro_batch_size}" or more.
    logprob_batch_size: PositiveInt
    # Samples that one generation batch of backend: transformers holds, on one GPU or CPU. 1 or more; as large as the KV
    # cache allows. vLLM has generation.vllm_kwargs.max_num_seqs (512) instead.
    generation_batch_size: PositiveInt
    # How answers are sampled.
    generation: GenerationConfig
