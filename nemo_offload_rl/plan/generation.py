"""Computes the GPU memory of generation, and whether it fits beside the state that the policy keeps on the GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config.megatron import engine_devices, engine_replicas, is_colocated
from nemo_offload_rl.config.schema.generation import VllmConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig, has_generation
from nemo_offload_rl.memory.units import GIB, show_gib
from nemo_offload_rl.plan.architecture import Architecture, UnknownArchitectureError, read_architecture
from nemo_offload_rl.plan.model_facts import DTYPE_BYTES, num_model_params
from nemo_offload_rl.plan.plan import OffloadPlan, colocates_vllm, stays_awake
from nemo_offload_rl.plan.refit_graphs import refit_graph_bytes
from nemo_offload_rl.residency.table import Phase

# GPU memory of a training process that cannot be offloaded: the CUDA context, kernels, and NCCL's buffers.
POLICY_OVERHEAD_BYTES = 2 * GIB

# Estimates of vLLM's memory beside weights and KV cache. For a 1.5 B run on an H200 the plan said 82.6 GiB for
# generation, and 70.0 were taken (docs/results/colocated.md).
_CONTEXT_BYTES, _CUDA_GRAPH_BYTES = GIB, GIB
# NCCL's communicators of an engine with several GPUs. On an H200 an engine whose two replicas share experts kept 2.43
# GiB asleep, context included (tests/unit/generation/test_gpu_engines_of_two.py).
_COMMUNICATORS_BYTES = 3 * GIB // 2
# max_num_batched_tokens where vllm_kwargs does not set it: the larger of vLLM's defaults.
_MAX_BATCHED_TOKENS = 16384
# max_num_seqs where vllm_kwargs leaves it to vLLM with null: likewise the larger of vLLM's defaults.
_VLLMS_MAX_NUM_SEQS = 1024
# float32 logits, their log-probs and their sorted copy, and int64 indices.
_SAMPLER_BYTES_PER_LOGIT = 3 * 4 + 8
_BLOCK_TOKENS = 16  # of vLLM's KV cache, where vllm_kwargs.block_size says nothing
# The refit fills one bucket while the engine loads the other.
_NUM_REFIT_BUCKETS = 2


@dataclass(frozen=True)
class EngineMemory:
    """Counts the bytes that a vLLM engine takes on one of its GPUs.

    Attributes:
        weights_bytes: size of the model's weights.
        kv_bytes_per_token: size of the KV cache per token.
        max_model_len: tokens of the longest sequence.
        max_num_seqs: the most sequences that vLLM runs at once.
        block_tokens: tokens of a block of the KV cache.
        share: `policy.generation.vllm_cfg.gpu_memory_utilization`, the share of the GPU that vLLM may take in all.
        reserve_bytes: estimated memory of activations, logits, CUDA graphs and the process.
        refit_bytes: size of the buckets, on the same GPU, that carry the weights in a refit.
        refit_graph_bytes: the most memory that a refit's CUDA graphs keep on the GPU between refits, in both processes;
            0 without vLLM on the policy's GPUs.
        own_kv_cache_bytes: `policy.generation.vllm_kwargs.kv_cache_memory_bytes`, which overrides `share`; None where
            the recipe does not set it.
        stays_awake: whether the engine keeps all of this memory while the policy computes on the same GPU.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    max_num_seqs: int
    block_tokens: int
    share: float
    reserve_bytes: int
    refit_bytes: int
    refit_graph_bytes: int
    own_kv_cache_bytes: int | None = None
    stays_awake: bool = False

    def gpu_rows(self, gpu_bytes: int | None) -> dict[str, dict[Phase, int]]:
        """Returns the bytes that the engine takes of a GPU shared with the policy: a row per item, by phase.

        Args:
            gpu_bytes: memory of the GPU, from which the KV cache's size is computed; None where it is not known.
        """
        with_weights = tuple(Phase) if self.stays_awake else (Phase.REFIT, Phase.GENERATE)
        with_cache = tuple(Phase) if self.stays_awake else (Phase.GENERATE,)
        rows = {"vLLM's weights": dict.fromkeys(with_weights, self.weights_bytes)}
        if self.own_kv_cache_bytes is not None:
            rows["vLLM's KV cache"] = dict.fromkeys(with_cache, self.own_kv_cache_bytes)
        elif gpu_bytes is not None:
            rows["vLLM's KV cache"] = dict.fromkeys(with_cache, max(0, self.kv_cache_bytes(gpu_bytes)))
        rows["refit's buckets"] = {Phase.REFIT: self.refit_bytes}
        rows["refit's CUDA graphs"] = dict.fromkeys(Phase, self.refit_graph_bytes)
        return rows

    def kv_cache_bytes(self, gpu_bytes: int) -> int:
        """Returns the bytes of the KV cache on a GPU of this size; negative where the share leaves no room for it."""
        if self.own_kv_cache_bytes is not None:
            return self.own_kv_cache_bytes
        of_share = int(self.share * gpu_bytes) - self.weights_bytes - self.reserve_bytes
        return min(of_share, self.most_kv_cache_bytes)

    @property
    def most_kv_cache_bytes(self) -> int:
        """Bytes of a KV cache for `max_num_seqs` sequences of `max_model_len` tokens."""
        blocks = -(-self.max_model_len // self.block_tokens) + 1  # one for the token that is scheduled ahead
        # vLLM gives the first block to no sequence.
        return (self.max_num_seqs * blocks + 1) * self.block_tokens * self.kv_bytes_per_token

    def is_capped(self, gpu_bytes: int) -> bool:
        """Returns whether the KV cache on a GPU of this size is limited by `most_kv_cache_bytes`, not by the share."""
        return self.own_kv_cache_bytes is None and self.kv_cache_bytes(gpu_bytes) == self.most_kv_cache_bytes

    def share_of(self, gpu_bytes: int) -> float:
        """Returns the share of a GPU of this size that the engine takes while it is awake."""
        if self.own_kv_cache_bytes is None and not self.is_capped(gpu_bytes):
            return self.share
        return self.awake_bytes(gpu_bytes) / gpu_bytes

    def awake_bytes(self, gpu_bytes: int) -> int:
        """Returns the bytes that an awake engine takes of a GPU of this size: weights, KV cache and the reserve."""
        return self.weights_bytes + self.kv_cache_bytes(gpu_bytes) + self.reserve_bytes

    @property
    def free_bytes_for_refit(self) -> int | None:
        """Free GPU memory that refit and generation need; with that much free, the policy need not empty torch's cache.

        The reserve counts twice, since it is an estimate. None where vLLM sizes the KV cache by the memory it finds
        free.
        """
        beside = 2 * self.reserve_bytes + self.refit_bytes + POLICY_OVERHEAD_BYTES
        if self.stays_awake:
            return beside
        return None if self.own_kv_cache_bytes is None else beside + self.weights_bytes + self.own_kv_cache_bytes

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the KV cache of one sequence of `max_model_len` tokens."""
        return self.kv_bytes_per_token * self.max_model_len


def asleep_bytes(policy: PolicyConfig) -> int:
    """Returns the bytes that a sleeping engine keeps on the policy's GPUs: CUDA context, communicators, CUDA graphs.

    Args:
        policy: the recipe's `policy` section, validated.
    """
    if colocates_vllm(policy):
        return _process_bytes(policy["generation"]["vllm_cfg"])
    return _CONTEXT_BYTES if has_generation(policy) and is_colocated(policy) else 0


def engine_bytes_beside_policy(policy: PolicyConfig, engine: EngineMemory | None, gpu_bytes: int) -> int:
    """Returns the bytes that generation takes of the policy's GPUs while the policy computes.

    Args:
        policy: the recipe's `policy` section, validated.
        engine: the memory that vLLM takes; None without vLLM.
        gpu_bytes: memory of the smallest GPU.
    """
    if engine is not None and engine.stays_awake:
        return engine.awake_bytes(gpu_bytes)
    return asleep_bytes(policy)


def free_bytes_for_refit(policy: PolicyConfig, hf_config: Mapping[str, Any]) -> int | None:
    """Returns how much GPU memory must be free for the policy to keep the cache of torch's allocator.

    Args:
        policy: the recipe's `policy` section, as workers get it.
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.

    Returns:
        Bytes; 0 where generation has GPUs of its own, None where the engine's memory is not known.
    """
    if has_generation(policy) and not is_colocated(policy):
        return 0
    try:
        engine = engine_memory(policy, hf_config)
    except UnknownArchitectureError:
        return None
    return None if engine is None else engine.free_bytes_for_refit


def engine_memory(policy: PolicyConfig, hf_config: Mapping[str, Any]) -> EngineMemory | None:
    """Returns the memory that a vLLM engine takes of each of its GPUs; None where the recipe does not use vLLM.

    Args:
        policy: the recipe's `policy` section.
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.

    Raises:
        UnknownArchitectureError: the model's sizes are not known before it is built.
    """
    if not has_generation(policy) or policy["generation"]["backend"] != "vllm":
        return None
    section = policy["generation"]["vllm_cfg"]
    architecture = read_architecture(hf_config, policy["megatron_cfg"])
    tp, dtype_bytes = section["tensor_parallel_size"], DTYPE_BYTES[section["precision"]]
    heads = max(1, architecture.num_query_groups // tp)  # vLLM replicates KV heads where there are fewer than GPUs
    kwargs = policy["generation"]["vllm_kwargs"]
    num_params = num_model_params(hf_config, policy["megatron_cfg"])
    num_expert_params = num_model_params(hf_config, policy["megatron_cfg"], only_experts=True)
    all_weights = num_params * dtype_bytes
    largest = max(architecture.vocab_size, architecture.ffn_hidden_size) * architecture.hidden_size * dtype_bytes
    buckets = max(int(policy["refit_buffer_size_gb"] * GIB), _NUM_REFIT_BUCKETS * largest)
    return EngineMemory(
        # Experts are shared out among all of the engine's GPUs, everything else among those of a replica.
        weights_bytes=(
            ((num_params - num_expert_params) * engine_replicas(section) + num_expert_params)
            * dtype_bytes
            // engine_devices(section)
        ),
        kv_bytes_per_token=2 * architecture.num_layers * heads * architecture.head_dim * dtype_bytes,
        max_model_len=section["max_model_len"],
        max_num_seqs=kwargs.get("max_num_seqs") or _VLLMS_MAX_NUM_SEQS,
        block_tokens=kwargs.get("block_size") or _BLOCK_TOKENS,
        share=section["gpu_memory_utilization"],
        reserve_bytes=_reserve_bytes(architecture, section, kwargs),
        refit_bytes=min(buckets, all_weights),
        refit_graph_bytes=refit_graph_bytes(policy, architecture),
        own_kv_cache_bytes=kwargs.get("kv_cache_memory_bytes"),
        stays_awake=stays_awake(policy),
    )


def _reserve_bytes(architecture: Architecture, section: VllmConfig, kwargs: Mapping[str, Any]) -> int:
    """Estimates vLLM's memory beside weights and KV cache.

    It counts a layer's tensors in the largest pass, the sampler's logits and what the process keeps asleep.
    """
    tp, dtype_bytes = section["tensor_parallel_size"], DTYPE_BYTES[section["precision"]]
    attention = (architecture.num_heads + 2 * architecture.num_query_groups) * architecture.head_dim // tp
    mlp = 3 * architecture.dense_ffn_hidden_size // tp
    if architecture.num_experts:
        # With expert parallelism a GPU has whole experts, and gathers the tokens of all replicas for them.
        parts = tp if section["expert_parallel_size"] == 1 else 1
        per_expert = 3 * architecture.ffn_hidden_size // parts + architecture.hidden_size
        mlp = max(mlp, engine_replicas(section) * (architecture.experts_per_token or 1) * per_expert)
    tokens = kwargs.get("max_num_batched_tokens") or _MAX_BATCHED_TOKENS
    activations = tokens * dtype_bytes * (4 * architecture.hidden_size + attention + mlp)
    logits = (kwargs.get("max_num_seqs") or _VLLMS_MAX_NUM_SEQS) * architecture.vocab_size * _SAMPLER_BYTES_PER_LOGIT
    return int(activations + logits + _process_bytes(section))


def _process_bytes(section: VllmConfig) -> int:
    """Estimates what a process of vLLM keeps on its GPU, even asleep: CUDA context, communicators, CUDA graphs."""
    communicators = _COMMUNICATORS_BYTES if engine_devices(section) > 1 else 0
    return _CONTEXT_BYTES + communicators + (0 if section["enforce_eager"] else _CUDA_GRAPH_BYTES)


def check_longest_sequence_fits(engine: EngineMemory, gpu_bytes: int) -> None:
    """Checks that the engine's KV cache holds one sequence of `max_model_len` tokens.

    Args:
        engine: the memory that the engine takes.
        gpu_bytes: memory of the smallest GPU.

    Raises:
        ValueError: it does not fit.
    """
    cache = engine.kv_cache_bytes(gpu_bytes)
    if engine.sequence_bytes <= cache:
        return
    sequence = (
        f"one sequence of max_model_len ({engine.max_model_len}) tokens needs {show_gib(engine.sequence_bytes)} GiB"
    )
    if engine.own_kv_cache_bytes is not None:
        raise ValueError(
            f"policy.generation.vllm_kwargs.kv_cache_memory_bytes is {cache}, which is {show_gib(cache)} GiB, but "
            f"{sequence} of KV cache; raise or delete it, or lower policy.generation.vllm_cfg.max_model_len."
        )
    raise ValueError(
        f"policy.generation.vllm_cfg.gpu_memory_utilization is {engine.share}, which is "
        f"{show_gib(int(engine.share * gpu_bytes))} of the GPU's {show_gib(gpu_bytes)} GiB, but weights take "
        f"{show_gib(engine.weights_bytes)} GiB of each GPU of an engine, activations and graphs an estimated "
        f"{show_gib(engine.reserve_bytes)} GiB, and {sequence} of KV cache; raise it, lower "
        "policy.generation.vllm_cfg.max_model_len, or, if the estimate is too high, give the KV cache's bytes in "
        "policy.generation.vllm_kwargs.kv_cache_memory_bytes."
    )


def refit_fits(plan: OffloadPlan, engine: EngineMemory, gpu_bytes: int) -> bool:
    """Returns whether a refit's buckets fit on the smallest GPU beside the policy and the engine's weights."""
    return kept_in_refit(plan, engine) + engine.weights_bytes + engine.refit_bytes <= gpu_bytes


def kept_in_refit(plan: OffloadPlan, engine: EngineMemory) -> int:
    """Returns the GPU memory of the policy's process during a refit, without the buckets."""
    return _kept_bytes(plan, Phase.REFIT) + POLICY_OVERHEAD_BYTES + engine.refit_graph_bytes


def check_refit_fits(plan: OffloadPlan, engine: EngineMemory, gpu_bytes: int) -> None:
    """Checks that a refit's buckets fit on the GPU beside the policy and the engine's weights.

    Args:
        plan: the offload plan, with the sizes of every pipeline stage.
        engine: the memory that the engine takes.
        gpu_bytes: memory of the smallest GPU.

    Raises:
        ValueError: it does not fit.
    """
    if refit_fits(plan, engine, gpu_bytes):
        return
    kept = kept_in_refit(plan, engine)
    raise ValueError(
        f"A refit needs {show_gib(engine.refit_bytes)} GiB of GPU memory for its buckets (policy.refit_buffer_size_gb, "
        f"or twice the largest tensor), in addition to {show_gib(kept)} GiB of the policy and "
        f"{show_gib(engine.weights_bytes)} GiB of vLLM's weights, but the GPU has {show_gib(gpu_bytes)} GiB; lower "
        "policy.refit_buffer_size_gb, offload more for the refit (policy.residency.table), or raise "
        "policy.generation.vllm_cfg.tensor_parallel_size."
    )


def share_beside_policy(plan: OffloadPlan, engine: EngineMemory, gpu_bytes: int) -> float:
    """Returns the share of the smallest GPU that the policy leaves to generation; negative if it leaves nothing."""
    kept = _kept_bytes(plan, Phase.GENERATE) + POLICY_OVERHEAD_BYTES + engine.refit_graph_bytes
    return 1 - kept / gpu_bytes


def _kept_bytes(plan: OffloadPlan, phase: Phase) -> int:
    return max(sum(rank.gpu_bytes[phase].values()) for rank in plan.ranks)


def check_share_beside_policy(plan: OffloadPlan, engine: EngineMemory, gpu_bytes: int) -> None:
    """Checks that generation's share of the GPU fits beside the state that the policy keeps there meanwhile.

    Args:
        plan: the offload plan, with the sizes of every pipeline stage.
        engine: the memory that the engine takes.
        gpu_bytes: Memory of the smallest GPU.

    Raises:
        ValueError: If the two do not fit.
    """
    kept, share = _kept_bytes(plan, Phase.GENERATE) + engine.refit_graph_bytes, engine.share_of(gpu_bytes)
    free = share_beside_policy(plan, engine, gpu_bytes)
    if share <= free:
        return
    if engine.own_kv_cache_bytes is not None:
        most = int(free * gpu_bytes) - engine.weights_bytes - engine.reserve_bytes
        raise ValueError(
            f"policy.generation.vllm_kwargs.kv_cache_memory_bytes is {engine.own_kv_cache_bytes}, which with "
            f"{show_gib(engine.weights_bytes)} GiB of weights and an estimated {show_gib(engine.reserve_bytes)} GiB "
            f"for activations and graphs is {share * gpu_bytes / GIB:.1f} of the GPU's {gpu_bytes / GIB:.1f} GiB, but "
            f"during generation the policy keeps {kept / GIB:.1f} GiB there and about "
            f"{POLICY_OVERHEAD_BYTES / GIB:.0f} GiB for its process; "
            + (f"set it to {most} or less, or " if most > 0 else "raise tensor_parallel_size, or ")
            + "offload more for generation (policy.residency.table)."
        )
    if engine.is_capped(gpu_bytes):
        found = (
            f"With a KV cache for {engine.max_num_seqs:,} sequences (policy.generation.vllm_kwargs.max_num_seqs) vLLM "
            f"takes {share * gpu_bytes / GIB:.1f} of the GPU's {gpu_bytes / GIB:.1f} GiB, within gpu_memory_utilization"
        )
        remedy = (
            "lower max_num_seqs or policy.generation.vllm_cfg.max_model_len, set "
            "policy.generation.vllm_cfg.gpu_memory_utilization to"
        )
    else:
        found = (
            f"policy.generation.vllm_cfg.gpu_memory_utilization is {share}, which is {share * gpu_bytes / GIB:.1f} of "
            f"the GPU's {gpu_bytes / GIB:.1f} GiB"
        )
        remedy = "set it to"
    raise ValueError(
        f"{found}, but during generation the policy keeps {kept / GIB:.1f} GiB there and about "
        f"{POLICY_OVERHEAD_BYTES / GIB:.0f} GiB for its process; {remedy} {max(0, int(free * 100)) / 100} or less, or "
        "offload more for generation (policy.residency.table)."
    )
