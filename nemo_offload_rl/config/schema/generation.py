"""The section `policy.generation`: how answers are sampled."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    IfAbsent,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Precision,
)

TopP = Annotated[float, Field(gt=0, le=1)]
# Share of a GPU's memory; the rest is for the policy.
MemoryShare = Annotated[float, Field(gt=0, lt=1)]


@with_config(STRICT)
class VllmConfig(TypedDict):
    """Section `policy.generation.vllm_cfg`: the engines of `backend: vllm`."""

    # Number of GPUs that share each layer of an engine. A divisor of the model's attention heads, and of the number of
    # GPUs that generation has on each node (cluster.gpus_per_node, unless colocated gives it fewer) or, for an engine
    # on several whole nodes, a multiple of it. Recommended: 1, or as many as the weights need, on one node.
    tensor_parallel_size: PositiveInt
    # Number of GPUs that an engine's experts are divided among: 1 splits each expert, tensor_parallel_size gives whole
    # experts to each GPU, and a multiple of it divides them among that many GPUs of several replicas, which share
    # nothing else. Recommended: 1, or more if the experts do not fit.
    expert_parallel_size: PositiveInt
    # Share of a GPU's memory that vLLM takes, for weights, activations and the KV cache, which gets what the other two
    # leave. Above 0, below 1; the state that the policy keeps on the GPU during generation must fit into the rest.
    # Recommended: 0.6.
    gpu_memory_utilization: MemoryShare
    # Largest number of tokens of a prompt and its answer together that the KV cache is sized for;
    # policy.max_total_sequence_length or more. Recommended: "${policy.max_total_sequence_length}".
    max_model_len: PositiveInt
    # Run without CUDA graphs and compilation: the engine starts faster and decodes more slowly. Recommended: false.
    enforce_eager: bool
    # Cache keys and values of common prompt prefixes until the weights change; null for vLLM's default. Recommended:
    # null, since all answers to a prompt share a prefix.
    enable_prefix_caching: NotRequired[Annotated[bool | None, IfAbsent(None)]]
    # Dtype of weights and activations; must equal policy.precision, since refits send that dtype. Recommended:
    # "${policy.precision}".
    precision: Precision
    # Whether the policy is built at the same time as the engines on its GPUs: with auto, if the GPU has room for both
    # and the size of vLLM's KV cache is given in bytes; with false, after them. Recommended: auto, for a faster start.
    build_beside_policy: NotRequired[Annotated[Literal["auto", False], IfAbsent("auto")]]
    # Environment variables of the engines' processes, set before they import anything; null or {} for none. Numbers and
    # booleans are read as text.
    env_vars: NotRequired[Annotated[dict[str, str] | None, IfAbsent(None)]]
    # Use vLLM's asynchronous engine, for multi-turn rollouts and requests one by one. Here all requests of a step are
    # submitted at once, so true is read as false, and a note says so. Recommended: false. Absent: false.
    async_engine: NotRequired[bool]


@with_config(STRICT)
class ColocatedResourcesConfig(TypedDict):
    """Section `policy.generation.colocated.resources`: the GPUs of generation where `enabled` is false."""

    # On one node (cluster.num_nodes 1): how many of cluster.gpus_per_node generation gets; the rest trains; 1 or more.
    # On several nodes: cluster.gpus_per_node or null, as generation then gets whole nodes.
    gpus_per_node: NotRequired[Annotated[PositiveInt | None, IfAbsent(None)]]
    # How many of cluster.num_nodes generation gets; the rest trains; null or 1 if cluster.num_nodes is 1.
    num_nodes: NotRequired[Annotated[PositiveInt | None, IfAbsent(None)]]


@with_config(STRICT)
class ColocatedConfig(TypedDict):
    """Section `policy.generation.colocated`: whether generation shares the policy's GPUs."""

    # true: policy and engines take turns on the same GPUs. false: each has its own GPUs (resources) and stays there;
    # weights are sent by broadcast. Recommended: true, since otherwise one side idles while the other works.
    enabled: bool
    # The GPUs reserved for generation; no effect if enabled is true. Absent: none.
    resources: NotRequired[Annotated[ColocatedResourcesConfig, IfAbsent({})]]


@with_config(STRICT)
class GenerationConfig(TypedDict):
    """Section `policy.generation`."""

    # Which engine samples: vllm, which needs GPUs and the extra vllm; or transformers, the Hugging Face model, which
    # runs everywhere. Without a GPU, vllm becomes transformers.
    backend: Literal["transformers", "vllm"]
    # Whether engines share the policy's GPUs. Absent: they share them.
    colocated: NotRequired[Annotated[ColocatedConfig, IfAbsent({"enabled": True})]]
    # Largest number of tokens in an answer; prompt and answer together stay within policy.max_total_sequence_length.
    # Recommended: "${policy.max_total_sequence_length}".
    max_new_tokens: PositiveInt
    # Divisor of the logits before sampling. Above 0; recommended 1.0, at which the log-probs are the model's own.
    temperature: PositiveFloat
    # Sample among the most likely tokens whose probabilities together reach this value. Above 0 to 1; recommended 1.0
    # for training, since a smaller value cuts off tokens without the loss accounting for it.
    top_p: TopP
    # Sample among this many most likely tokens; null for all. Recommended: null for training.
    top_k: PositiveInt | None
    # Temperature in validation; 0 takes the most likely token. Recommended: "${.temperature}", or 0.0.
    val_temperature: NonNegativeFloat
    # top_p in validation. Recommended: "${.top_p}".
    val_top_p: TopP
    # top_k in validation. Recommended: "${.top_k}".
    val_top_k: PositiveInt | None
    # Token ids that end an answer, in addition to the model's own ends (see ignore_eos); null for the tokenizer's
    # end-of-sequence token. Recommended: null.
    stop_token_ids: list[NonNegativeInt] | None
    # false: the model's own ends also end an answer; they are the eos_token_id of its generation_config.json, or of its
    # config.json or policy.hf_config without that file. true: only stop_token_ids, where null still stands for the
    # tokenizer's end-of-sequence token, and stop_strings do. Recommended: false.
    ignore_eos: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Strings that also end an answer as soon as its text contains one; the string stays in the answer. Special tokens
    # count with the text they are written as. Null or [] for none. Recommended: null, since the end-of-sequence token
    # needs no text search.
    stop_strings: NotRequired[Annotated[list[NonEmptyStr] | None, IfAbsent(None)]]
    # Words that answers must not contain, each as the tokenizer encodes it, and as it does behind a space: no token is
    # sampled that would complete one. Log-probs of the sampler are of the distribution without these tokens, those of
    # the policy of the whole one. Null or [] for none. Recommended: null.
    bad_words: NotRequired[Annotated[list[NonEmptyStr] | None, IfAbsent(None)]]
    # NeMo-RL's transport of weights to generation's own GPUs. All of them bring the same bits; here the weights are
    # broadcast whichever is named, and a note says so. Null if GPUs are shared. Recommended: null.
    refit_transport: NotRequired[
        Annotated[Literal["nccl_reshard", "nixl", "vllm_s3_sparse", "vllm_zmq_sparse"] | None, IfAbsent(None)]
    ]
    # The engines of backend: vllm. Absent: only with another backend, since the engines' sizes have no defaults. No
    # effect with another backend.
    vllm_cfg: NotRequired[VllmConfig]
    # Additional arguments of vLLM's `LLM`, under vLLM's names. Arguments that other keys of the recipe stand for, and
    # those that quantize weights or draft tokens, are rejected. kv_cache_memory_bytes, for each GPU, takes precedence
    # over the size that follows from vllm_cfg.gpu_memory_utilization. No effect with another backend. Absent: none.
    vllm_kwargs: NotRequired[dict[str, Any]]
