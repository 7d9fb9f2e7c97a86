"""The GPU memory that the plan gives each phase of a GRPO step, beside which its peak is reported."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.generation import POLICY_OVERHEAD_BYTES
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.run.preflight import check_sizes


def planned_gib(config: Mapping[str, Any], gpu_bytes: int) -> dict[str, float]:
    """Returns GiB by the timer's name of a phase; nothing where the plan has no vLLM.

    Activations and logits count with the least that the plan knows of. The engine takes its share of the GPU while it
    is awake, and nothing while it sleeps.

    Args:
        config: the recipe as the run resolves it.
        gpu_bytes: memory of the GPU.
    """
    run = check_sizes(config, "grpo")
    if run is None or run.engine is None:
        return {}
    rank, engine = run.plan.largest_rank, run.engine
    held = {phase: sum(rank.gpu_bytes[phase].values()) + POLICY_OVERHEAD_BYTES for phase in Phase}
    awake = held[Phase.GENERATE] + int(engine.share_of(gpu_bytes) * gpu_bytes)
    refit = held[Phase.REFIT] + engine.weights_bytes + engine.refit_bytes
    beside = refit + engine.kv_cache_bytes(gpu_bytes)  # where there is room the KV cache is mapped while weights come
    training = held[Phase.TRAIN] + rank.least_activation_bytes + rank.step_grad_bytes
    logprobs = held[Phase.LOGPROB]
    phases = {
        "refit": beside if beside <= gpu_bytes else max(refit, awake),
        "generation": awake,
        "logprobs": logprobs,
        "reference_logprobs": logprobs,
        "training": training,
    }
    return {name: nbytes / GIB for name, nbytes in phases.items()}
