"""Whether generation's share of a GPU fits beside what the policy keeps there."""

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.residency.table import Phase

# What a process that trains keeps on a GPU whatever it offloads: the CUDA context, kernels, and NCCL's buffers.
POLICY_OVERHEAD_BYTES = 2 * GIB


def check_share_beside_policy(plan: OffloadPlan, share: float, gpu_bytes: int) -> None:
    """Refuse a share of the GPU that generation cannot have while the policy waits.

    Args:
        plan: With the sizes of every pipeline stage.
        share: `policy.generation.vllm_cfg.gpu_memory_utilization`.
        gpu_bytes: Memory of the smallest GPU.

    Raises:
        ValueError: If the two do not fit.
    """
    kept = max(sum(rank.gpu_bytes[Phase.GENERATE].values()) for rank in plan.ranks)
    free = 1 - (kept + POLICY_OVERHEAD_BYTES) / gpu_bytes
    if share <= free:
        return
    raise ValueError(
        f"policy.generation.vllm_cfg.gpu_memory_utilization is {share}, which is {share * gpu_bytes / GIB:.1f} of the "
        f"GPU's {gpu_bytes / GIB:.1f} GiB, but beside generation the policy keeps {kept / GIB:.1f} GiB there and about "
        f"{POLICY_OVERHEAD_BYTES / GIB:.0f} GiB for its process; set it to {max(0, int(free * 100)) / 100} or less, or "
        "have more offloaded for generation (policy.residency.table)."
    )
