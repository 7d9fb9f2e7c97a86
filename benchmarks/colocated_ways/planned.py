"""Computes the GPU memory that the plan gives each phase of a GRPO step, for comparison with its peak."""

from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.decisions import Resolved
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.shared_gpu import phase_bytes
from nemo_offload_rl.residency.table import Phase

_TIMED = {
    "refit": Phase.REFIT,
    "sampling": Phase.GENERATE,
    "logprobs": Phase.LOGPROB,
    "reference_logprobs": Phase.LOGPROB,
    "training": Phase.TRAIN,
}
"""The timer's names of what a phase is entered for."""


def planned_gib(resolved: Resolved, gpu_bytes: int) -> dict[str, float]:
    """Returns GiB by the timer's name of a phase; empty where the plan has no vLLM.

    Args:
        resolved: a GRPO recipe as it runs.
        gpu_bytes: memory of the GPU.
    """
    run, config = resolved.run, resolved.config
    if run is None or run.engine is None:
        return {}
    planner = Planner(hf_config(config["policy"]).to_dict(), "grpo", gpu_bytes)
    planned = phase_bytes(config, planner, run, gpu_bytes)
    return {name: planned[phase] / GIB for name, phase in _TIMED.items()}
