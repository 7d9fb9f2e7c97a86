"""What generation takes of a GPU, and whether it fits beside what the policy keeps there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.memory.units import GIB, show_gib
from nemo_offload_rl.plan.architecture import read_architecture
from nemo_offload_rl.plan.model_facts import DTYPE_BYTES, num_model_params
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.residency.table import Phase

# What a process that trains keeps on a GPU whatever it offloads: the CUDA context, kernels, and NCCL's buffers.
POLICY_OVERHEAD_BYTES = 2 * GIB


@dataclass(frozen=True)
class EngineMemory:
    """What one GPU of a vLLM engine holds.

    Attributes:
        weights_bytes: of the model.
        kv_bytes_per_token: of the KV cache.
        max_model_len: tokens of the longest sequence.
        share: `policy.generation.vllm_cfg.gpu_memory_utilization`, which bounds weights, KV cache and all else.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    share: float

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the KV cache of one sequence of the greatest length."""
        return self.kv_bytes_per_token * self.max_model_len


def engine_memory(policy: Mapping[str, Any], hf_config: Mapping[str, Any]) -> EngineMemory | None:
    """What an engine takes of each of its GPUs; None where the recipe has no vLLM.

    Args:
        policy: the recipe's section.
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.

    Raises:
        UnknownArchitectureError: the model's sizes are not known before it is built.
    """
    if "generation" not in policy or policy["generation"]["backend"] != "vllm":
        return None
    section = policy["generation"]["vllm_cfg"]
    architecture = read_architecture(hf_config, policy["megatron_cfg"])
    tp, dtype_bytes = section["tensor_parallel_size"], DTYPE_BYTES[section["precision"]]
    heads = max(1, architecture.num_query_groups // tp)  # fewer heads than GPUs are repeated
    return EngineMemory(
        weights_bytes=num_model_params(hf_config, policy["megatron_cfg"]) * dtype_bytes // tp,
        kv_bytes_per_token=2 * architecture.num_layers * heads * architecture.head_dim * dtype_bytes,
        max_model_len=section["max_model_len"],
        share=section["gpu_memory_utilization"],
    )


def check_longest_sequence_fits(engine: EngineMemory, gpu_bytes: int) -> None:
    """Refuse an engine whose share of the GPU cannot hold its weights and the KV cache of one sequence.

    vLLM takes more, for activations and graphs, and says so itself.

    Args:
        engine: what it takes.
        gpu_bytes: memory of the smallest GPU.

    Raises:
        ValueError: it does not fit.
    """
    have, need = int(engine.share * gpu_bytes), engine.weights_bytes + engine.sequence_bytes
    if need <= have:
        return
    raise ValueError(
        f"policy.generation.vllm_cfg.gpu_memory_utilization is {engine.share}, which is {show_gib(have)} of the GPU's "
        f"{show_gib(gpu_bytes)} GiB, but weights take {show_gib(engine.weights_bytes)} GiB of each GPU of an engine "
        f"and one sequence of max_model_len ({engine.max_model_len}) tokens {show_gib(engine.sequence_bytes)} GiB of "
        "KV cache; raise it, or lower policy.generation.vllm_cfg.max_model_len."
    )


def share_beside_policy(plan: OffloadPlan, gpu_bytes: int) -> float:
    """Returns the share of the smallest GPU that the policy leaves to generation; below 0 where it leaves nothing."""
    return 1 - (_kept_bytes(plan) + POLICY_OVERHEAD_BYTES) / gpu_bytes


def _kept_bytes(plan: OffloadPlan) -> int:
    return max(sum(rank.gpu_bytes[Phase.GENERATE].values()) for rank in plan.ranks)


def check_share_beside_policy(plan: OffloadPlan, share: float, gpu_bytes: int) -> None:
    """Refuse a share of the GPU that generation cannot have while the policy waits.

    Args:
        plan: With the sizes of every pipeline stage.
        share: `policy.generation.vllm_cfg.gpu_memory_utilization`.
        gpu_bytes: Memory of the smallest GPU.

    Raises:
        ValueError: If the two do not fit.
    """
    kept, free = _kept_bytes(plan), share_beside_policy(plan, gpu_bytes)
    if share <= free:
        return
    raise ValueError(
        f"policy.generation.vllm_cfg.gpu_memory_utilization is {share}, which is {share * gpu_bytes / GIB:.1f} of the "
        f"GPU's {gpu_bytes / GIB:.1f} GiB, but beside generation the policy keeps {kept / GIB:.1f} GiB there and about "
        f"{POLICY_OVERHEAD_BYTES / GIB:.0f} GiB for its process; set it to {max(0, int(free * 100)) / 100} or less, or "
        "have more offloaded for generation (policy.residency.table)."
    )
