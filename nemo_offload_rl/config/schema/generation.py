"""The section `policy.generation`: how answers are sampled."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Precision,
)

TopP = Annotated[float, Field(gt=0, le=1)]
# Of a GPU's memory; what is left is the policy's.
MemoryShare = Annotated[float, Field(gt=0, lt=1)]


@with_config(STRICT)
class VllmConfig(TypedDict):
    """Section `policy.generation.vllm_cfg`: the engines of `backend: vllm`."""

    # GPUs that share each layer of an engine. A divisor of the GPUs that generation has of a node (cluster.
    # gpus_per_node, unless colocated gives it fewer) and of the model's attention heads.
    # Recommended: 1, or as many as the weights need.
    tensor_parallel_size: PositiveInt
    # GPUs that an engine's layers are divided among; 1 alone is supported.
    pipeline_parallel_size: PositiveInt
    # GPUs that an engine's experts are divided among: 1 splits each expert, tensor_parallel_size gives whole experts to
    # each GPU. Recommended: 1.
    expert_parallel_size: PositiveInt
    # Share of a GPU's memory that vLLM takes, for weights, activations and the KV cache, which gets what these leave.
    # Above 0, below 1; what the policy keeps on the GPU beside generation has to fit into the rest. Recommended: 0.6.
    gpu_memory_utilization: MemoryShare
    # Most tokens of a prompt with its answer that the KV cache is made for; policy.max_total_sequence_length or more.
    # Recommended: "${policy.max_total_sequence_length}".
    max_model_len: PositiveInt
    # Run without CUDA graphs and compilation: a shorter start, slower decoding. Recommended: false.
    enforce_eager: bool
    # Keep keys and values of prompts that begin alike, until the weights change; null is as vLLM has it. Recommended:
    # null, since the answers to a prompt begin alike. Absent: null.
    enable_prefix_caching: NotRequired[bool | None]
    # Type of weights and activations; policy.precision, since refits send that. Recommended: "${policy.precision}".
    precision: Precision
    # Whether the policy is built at once with the engines on its GPUs: auto, where the GPU has room for both and vLLM's
    # KV cache is given in bytes; false, behind them. Recommended: auto, a shorter start. Absent: auto.
    build_beside_policy: NotRequired[Literal["auto", False]]
    # Environment variables of the engines' processes, set before they import anything; null or {} for none. Numbers
    # and booleans are read as text. Absent: none.
    env_vars: NotRequired[dict[str, str] | None]
    # Where the first weights come from; dummy alone, as the first refit brings them. Absent: dummy.
    load_format: NotRequired[str]
    # Type of the KV cache; auto alone: that of the weights. Absent: auto.
    kv_cache_dtype: NotRequired[str]
    # vLLM's asynchronous engine, for asynchronous GRPO and rollouts of several turns. A step's requests come at once
    # here, so true is read as false, with a line. Recommended: false. Absent: false.
    async_engine: NotRequired[bool]
    # Leave the tokenizer out of the engine; true alone, as prompts and answers are token ids here; with
    # policy.generation.stop_strings the engine has one all the same. Absent: true.
    skip_tokenizer_init: NotRequired[bool]
    # Whose log-probs the engine reports; processed_logprobs alone: those of the distribution that is sampled, after
    # temperature, top_k and top_p. Absent: processed_logprobs.
    logprobs_mode: NotRequired[str]
    # First layers of an fp8 engine that stay in bfloat16; 0 alone. Absent: 0.
    num_first_layers_in_bf16: NotRequired[NonNegativeInt]
    # Last layers of an fp8 engine that stay in bfloat16; 0 alone. Absent: 0.
    num_last_layers_in_bf16: NotRequired[NonNegativeInt]
    # DeepGEMM's kernels for fp8; false alone. Absent: false.
    use_deep_gemm: NotRequired[bool]
    # Port of a server that takes weights over HTTP; null alone. Absent: null.
    http_refit_server_port: NotRequired[int | None]
    # Port of a server that takes weights over ZeroMQ; null alone. Absent: null.
    zmq_refit_server_port: NotRequired[int | None]
    # Reset the cache of images' encodings after a refit; false alone. Absent: false.
    reset_encoder_cache_after_weight_update: NotRequired[bool]


@with_config(STRICT)
class ColocatedResourcesConfig(TypedDict):
    """Section `policy.generation.colocated.resources`: what generation has for itself where `enabled` is false."""

    # Of one node (cluster.num_nodes 1): GPUs that generation gets of cluster.gpus_per_node, the rest trains; 1 or more.
    # Of several nodes: cluster.gpus_per_node or null, as generation then gets whole nodes. Absent: null.
    gpus_per_node: NotRequired[PositiveInt | None]
    # Nodes that generation gets of cluster.num_nodes, the rest trains; null or 1 where cluster.num_nodes is 1.
    # Absent: null.
    num_nodes: NotRequired[PositiveInt | None]


@with_config(STRICT)
class ColocatedConfig(TypedDict):
    """Section `policy.generation.colocated`: whether generation shares the policy's GPUs."""

    # true: policy and engines take turns on the same GPUs. false: each has GPUs of its own (resources), where it stays;
    # weights go there by broadcast. Recommended: true, since either side waits while the other works.
    enabled: bool
    # The GPUs that generation has for itself; without effect where enabled is true. Absent: none.
    resources: NotRequired[ColocatedResourcesConfig]


@with_config(STRICT)
class GenerationConfig(TypedDict):
    """Section `policy.generation`."""

    # What samples: vllm, which needs GPUs and the extra vllm; or transformers, the Hugging
    # Face model, which runs everywhere. Without a GPU, vllm becomes transformers.
    backend: Literal["transformers", "vllm"]
    # Whether engines share the policy's GPUs. Absent: they do.
    colocated: NotRequired[ColocatedConfig]
    # Most tokens of an answer; prompt and answer together stay within policy.max_total_sequence_length.
    # Recommended: "${policy.max_total_sequence_length}".
    max_new_tokens: PositiveInt
    # Divides the logits before sampling. Above 0; recommended 1.0, at which the log-probs are the model's own.
    temperature: PositiveFloat
    # Sample among the likeliest tokens that have this probability together. Above 0 to 1; recommended 1.0 for
    # training, as less cuts tokens off that the loss knows nothing of.
    top_p: TopP
    # Sample among this many likeliest tokens; null for all. Recommended: null for training.
    top_k: PositiveInt | None
    # Temperature of validation; 0 takes the likeliest token. Recommended: "${.temperature}", or 0.0.
    val_temperature: NonNegativeFloat
    # top_p of validation. Recommended: "${.top_p}".
    val_top_p: TopP
    # top_k of validation. Recommended: "${.top_k}".
    val_top_k: PositiveInt | None
    # Token ids that end an answer; null for the tokenizer's end of sequence. Recommended: null.
    stop_token_ids: list[NonNegativeInt] | None
    # Strings that end an answer, too, as soon as its text has one; the answer keeps it. Special tokens count as they
    # are written. Null or [] for none. Recommended: null, since the end of sequence costs no search. Absent: null.
    stop_strings: NotRequired[list[NonEmptyStr] | None]
    # How NeMo-RL moves weights to generation's own GPUs. All of these bring the same bits; they are broadcast here,
    # whichever is named, with a line. Null where GPUs are shared. Recommended: null. Absent: null.
    refit_transport: NotRequired[Literal["nccl_reshard", "nixl", "vllm_s3_sparse", "vllm_zmq_sparse"] | None]
    # The engines of backend: vllm. Absent: no vLLM, whose sizes have no defaults. Without effect with another backend.
    vllm_cfg: NotRequired[VllmConfig]
    # Further arguments of vLLM's `LLM`, by its own names. Those that other keys of the recipe stand for, and those that
    # quantise weights or draft tokens, are refused. kv_cache_memory_bytes, of each GPU, goes before what follows from
    # vllm_cfg.gpu_memory_utilization. Without effect with another backend. Absent: none.
    vllm_kwargs: NotRequired[dict[str, Any]]
