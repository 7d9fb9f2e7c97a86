"""The section `policy`: the model that is trained, and how; also in terms of Hugging Face's config."""

import math
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeGuard

from pydantic import with_config

from nemo_offload_rl.config.schema.generation import GenerationConfig
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.residency import ActivationOffloadConfig, ResidencyOrAuto
from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    STRICT_WITH_FURTHER_FIELDS,
    IfAbsent,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    NumaSetting,
    PositiveFloat,
    PositiveInt,
    Precision,
    RowTokens,
)


@with_config(STRICT_WITH_FURTHER_FIELDS)
class HfConfigFields(TypedDict):
    """Sections `policy.hf_config` and `policy.hf_config_overrides`: the fields that the rules and the plan read.

    The fields have Hugging Face's names; config.model.hf_check checks the other fields of a family. The MLP's sizes are
    not here, since some families have lists where others have numbers.
    """

    # The model family, such as qwen3 or llama. Absent: an error in hf_config; the model's own in hf_config_overrides.
    model_type: NotRequired[NonEmptyStr]
    # Number of layers. Absent: the family's default.
    num_hidden_layers: NotRequired[PositiveInt]
    # Size of the hidden states. Absent: the family's default.
    hidden_size: NotRequired[PositiveInt]
    # Number of attention heads, a multiple of megatron_cfg.tensor_model_parallel_size. Absent: the family's default.
    num_attention_heads: NotRequired[PositiveInt]
    # Number of key and value heads. Null or absent: the family's default.
    num_key_value_heads: NotRequired[PositiveInt | None]
    # Size of an attention head. Null or absent: the family's default, usually hidden_size / num_attention_heads.
    head_dim: NotRequired[PositiveInt | None]
    # Number of vocabulary entries. Absent: the family's default.
    vocab_size: NotRequired[PositiveInt]
    # Number of experts in a layer, under Qwen's name. Null or absent: the family's default.
    num_experts: NotRequired[NonNegativeInt | None]
    # Number of experts in a layer, under Mixtral's name. Null or absent: the family's default.
    num_local_experts: NotRequired[NonNegativeInt | None]
    # Number of experts in a layer, under DeepSeek's name. Null or absent: the family's default.
    n_routed_experts: NotRequired[NonNegativeInt | None]
    # Number of experts that each token is routed to. Null or absent: the family's default.
    num_experts_per_tok: NotRequired[PositiveInt | None]


@with_config(STRICT)
class TokenizerConfig(TypedDict):
    """Section `policy.tokenizer`."""

    # A folder, a hub name, or `arithmetic` for the built-in tokenizer of the arithmetic task.
    # Recommended: "${policy.model_name}".
    name: NonEmptyStr
    # Jinja template that turns messages into a prompt, or the path of a file with one, which ends in .jinja. default is
    # the tokenizer's own template; null joins the texts of the messages. Absent: the tokenizer's own template if it has
    # one, otherwise the plain text.
    chat_template: NotRequired[str | None]
    # Additional arguments of the template, such as {enable_thinking: false}; null for none.
    chat_template_kwargs: NotRequired[Annotated[dict[str, Any] | None, IfAbsent(None)]]


@with_config(STRICT)
class SequencePackingConfig(TypedDict):
    """Section `policy.sequence_packing`: puts several samples into one row, without padding between them."""

    # Pack micro-batches. Recommended: true, unless all samples are equally long.
    enabled: bool
    # Largest number of tokens in a packed row in training: a number, or auto for as many as fit on the GPU by the plan,
    # up to 32,768; if the GPU's memory or the model's sizes are not known, auto is max_total_sequence_length x
    # train_micro_batch_size (for pairs, twice that). A longer sample stops the run. Recommended: auto. Absent: allowed
    # while enabled is false.
    train_mb_tokens: NotRequired[RowTokens]
    # Largest number of tokens in a packed row of a log-prob pass: a number, or auto as for train_mb_tokens, with
    # logprob_batch_size if the recipe has one. Recommended: auto. Absent: allowed while enabled is false, or if the
    # algorithm has no log-prob pass.
    logprob_mb_tokens: NotRequired[RowTokens]
    # How samples are assigned to rows: modified_first_fit_decreasing; while enabled is false also modified_ffd, as
    # NeMo-RL's recipes have it. Absent: allowed while enabled is false.
    algorithm: NotRequired[Literal["modified_first_fit_decreasing", "modified_ffd"]]
    # The order in which a rank runs its packed rows: packer (as they were packed), or largest_first, with which smaller
    # rows reuse the memory of the largest. Recommended: packer. Null or absent: packer.
    microbatch_order: NotRequired[Literal["packer", "largest_first"] | None]
    # The length of a packed row is rounded up to a multiple of this many tokens. 1 or more; recommended 64. Absent:
    # allowed while enabled is false.
    sequence_length_round: NotRequired[PositiveInt]


@with_config(STRICT)
class PolicyConfig(TypedDict):
    """Section `policy` of every recipe."""

    # The model: a folder in Hugging Face format or a name on the hub; only a label if hf_config is given.
    model_name: NonEmptyStr
    # A Hugging Face config as a mapping (model_type, hidden_size ...), from which a model with random weights is built.
    # Null: config and weights come from model_name.
    hf_config: NotRequired[Annotated[HfConfigFields | None, IfAbsent(None)]]
    # Train the model without the check that compares a small twin of it, with the same flags, with transformers; needed
    # for a model that the check refuses or cannot compute. Recommended: false.
    skip_model_check: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Pass fields of Megatron on whose effect was not checked here (docs/recipe-keys.md lists those that were), and log
    # a line for each. They may have no effect, or one that other parts do not know of. Recommended: false.
    unchecked_megatron_fields: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Fields of the Hugging Face config to override, such as {rope_theta: 1000000}. Absent: none.
    hf_config_overrides: NotRequired[Annotated[HfConfigFields, IfAbsent({})]]
    # Run the code that comes with the files of model_name and tokenizer.name, where their auto_map names some, in
    # transformers, Megatron-Bridge and vLLM. Recommended: false; true only for models whose code you have read or
    # trust. (NeMo-RL always runs it.)
    trust_remote_code: NotRequired[Annotated[bool, IfAbsent(False)]]
    # The tokenizer.
    tokenizer: TokenizerConfig
    # Dtype of parameters and activations: bfloat16 or float32. Recommended: bfloat16 on GPUs, float32 on a CPU.
    precision: Precision
    # Largest number of tokens of a prompt and its answer together. 1 or more; no longer than the task needs, since
    # memory grows with it. A multiple of 128 if megatron_cfg.cuda_graph_modules captures attn.
    max_total_sequence_length: PositiveInt
    # Padded lengths are rounded up to a multiple of this. Recommended:
    # "${policy.megatron_cfg.tensor_model_parallel_size}", which sequence parallelism needs.
    make_sequence_length_divisible_by: PositiveInt
    # Samples in one optimizer step, over all ranks. A multiple of data-parallel size x train_micro_batch_size. GRPO
    # steps with more samples have several optimizer steps, all but the first off-policy.
    train_global_batch_size: PositiveInt
    # Samples in one forward and backward pass on one rank. 1 or more; as large as memory allows.
    train_micro_batch_size: PositiveInt
    # Largest gradient norm, for megatron_cfg.optimizer.clip_grad to refer to; 0 disables clipping. Recommended: 1.0;
    # null if clip_grad is set to a number directly.
    max_grad_norm: NotRequired[Annotated[NonNegativeFloat | None, IfAbsent(None)]]
    # Number of steps with a loss or gradient that is not finite that a run may skip before it stops; a resumed run
    # counts on. 0 or more; recommended 10; 0 stops the run at the first one.
    max_skipped_steps: NotRequired[Annotated[NonNegativeInt, IfAbsent(0)]]
    # Megatron: parallelism, optimizer, memory.
    megatron_cfg: MegatronConfig
    # Packing of several samples into one row. Absent: no packing.
    sequence_packing: NotRequired[Annotated[SequencePackingConfig, IfAbsent({"enabled": False})]]
    # Memory of the buffer through which weights go to generation, in GiB, allocated only during a refit. Above 0;
    # recommended 1.0. If policy and engine share their GPUs, the buffer exists once, and its halves alternate; for an
    # engine on its own GPUs it is the size of a bucket, on both sides.
    refit_buffer_size_gb: NotRequired[Annotated[PositiveFloat, IfAbsent(1.0)]]
    # Compare checksums of the weights on both sides after every refit. Recommended: true in tests.
    verify_refit: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Compute log-probs outside of training (GRPO, DPO) from the logits of this many tokens at a time, so that the
    # logits of a whole micro-batch are never in memory at once; null: as in training
    # (megatron_cfg.use_fused_linear_logprobs). 1 or more; recommended 1024 if the log-prob pass runs out of memory
    # without it.
    logprob_chunk_size: NotRequired[Annotated[PositiveInt | None, IfAbsent(None)]]
    # Offload optimizer state to the host before weights are sent to generation, until the next training step needs it.
    # null: with vLLM, only if the plan finds no room for it on the GPU; with transformers, true. Recommended: null.
    offload_optimizer_for_refit: NotRequired[Annotated[bool | None, IfAbsent(None)]]
    # Offload optimizer state to the host during log-prob passes, too. Recommended: false; true if the activations of
    # these passes need the memory. Absent: false, so that it stays where it is.
    offload_optimizer_for_logprob: NotRequired[bool]
    # Pin the host memory of optimizer state, so that it is copied at the speed of the link. With false, copies go
    # through a small pinned buffer at the speed of the CPU's memcpy; use it on machines where that much memory cannot
    # be pinned. Recommended: true.
    use_pinned_optimizer_offload: NotRequired[Annotated[bool, IfAbsent(True)]]
    # Where training state lives in each phase, and its host memory. auto: every key of the section gets the value that
    # it has when absent, and the cells of its table that may be auto are set to auto. Recommended: the section, or
    # auto. Absent: the flags above decide; no limit, no checksums, huge pages.
    residency: NotRequired[Annotated[ResidencyOrAuto, IfAbsent({})]]
    # Strictness and host memory of activation offloading (megatron_cfg.fine_grained_activation_offloading). Absent: not
    # strict, with as much host memory as the plan computes.
    activation_offload: NotRequired[Annotated[ActivationOffloadConfig, IfAbsent({})]]
    # What a run adds so that activations fit its GPUs. null: nothing. auto: what `nemo-offload-rl plan --fit` finds for
    # the machine: of recomputed layers, activations on the host, MLPs in tiles, logits in chunks, streamed optimizer
    # state, and the length of rows that is auto, what takes the fewest predicted seconds of a step. What the recipe
    # turns on or sets stays, and one that fits stays as it is, unless that would save 3% of a step. Recommended: auto.
    activation_memory: NotRequired[Annotated[Literal["auto"] | None, IfAbsent(None)]]
    # NUMA node that a rank's CPU threads and host memory are bound to: auto (the node of its GPU), none, or the number
    # of a node. Recommended: auto.
    numa: NotRequired[Annotated[NumaSetting, IfAbsent("auto")]]


@with_config(STRICT)
class GRPOPolicyConfig(PolicyConfig):
    """Section `policy` of a GRPO recipe: adds generation."""

    # Samples in one forward pass on one rank that only computes log-probs. 1 or more; recommended
    # "${policy.train_micro_batch_size}" or more.
    logprob_batch_size: PositiveInt
    # Samples in one generation batch of backend: transformers, on one GPU or CPU. 1 or more; as large as the KV cache
    # allows. vLLM uses generation.vllm_kwargs.max_num_seqs (512) instead.
    generation_batch_size: PositiveInt
    # How answers are sampled.
    generation: GenerationConfig


REPLAYED = "replayed_generation"
"""The key of the section `generation` in the resolved policy of a run that replays rollouts, which has no engine."""


def has_generation(policy: PolicyConfig) -> TypeGuard[GRPOPolicyConfig]:
    """Returns whether a run samples answers, as GRPO's do, so that its policy section has those keys."""
    return "generation" in policy


def has_logprob_batches(policy: PolicyConfig) -> TypeGuard[GRPOPolicyConfig]:
    """Returns whether log-prob passes have a batch size of their own, as GRPO's do."""
    return "logprob_batch_size" in policy


def sampling_of(policy: PolicyConfig) -> GenerationConfig | None:
    """Returns how the answers that a policy trains on are, or were, sampled; None where it trains on given answers."""
    found: GenerationConfig | None = policy.get("generation", policy.get(REPLAYED))  # type: ignore[assignment]
    return found


FILTERED_LOGPROBS = ("vllm",)
"""The generation backends whose log-probs are those of the distribution after top_k and top_p."""


def filters_logprobs(sampling: GenerationConfig | None) -> TypeGuard[GenerationConfig]:
    """Returns whether the sampler's log-probs are those of the tokens that top_k and top_p leave, not of all."""
    if sampling is None or sampling["backend"] not in FILTERED_LOGPROBS:
        return False
    return sampling["top_k"] is not None or sampling["top_p"] != 1


def sequence_multiple(policy: PolicyConfig) -> int:
    """Returns what each sequence's tokens are padded to a multiple of.

    Context parallelism cuts each sequence into 2 x CP chunks, whose tokens sequence parallelism divides.
    """
    return math.lcm(policy["make_sequence_length_divisible_by"], _chunks(policy["megatron_cfg"]))


def row_multiple(policy: PolicyConfig) -> int:
    """Returns what the tokens of a packed row are padded to a multiple of."""
    return math.lcm(policy["sequence_packing"]["sequence_length_round"], _chunks(policy["megatron_cfg"]))


def _chunks(cfg: MegatronConfig) -> int:
    if cfg["context_parallel_size"] == 1:
        return 1
    return 2 * cfg["context_parallel_size"] * (cfg["tensor_model_parallel_size"] if cfg["sequence_parallel"] else 1)
