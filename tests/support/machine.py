"""Plans and resolves recipes for machines that are given by the size of a GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.decisions import Machine, Resolved
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.resolve import resolve


def planner_of(config: Mapping[str, Any], gpu_gib: float | None, *, hosts: Sequence[Any] = ()) -> Planner:
    """Returns the planner of a GRPO recipe; with None, no GPU's memory is known."""
    fields = hf_config(config["policy"]).to_dict()
    return Planner(fields, "grpo", _bytes(gpu_gib), hosts)


def resolved_for(config: Mapping[str, Any], gpu_gib: float | None, algorithm: str = "grpo") -> Resolved:
    """Returns a recipe as it runs on GPUs of a size; raises the error of a failed decision."""
    fields = hf_config(config["policy"]).to_dict()
    machine = Machine(has_gpus=True, gpu_bytes=_bytes(gpu_gib))
    resolved = resolve(config, machine, fields, algorithm=algorithm)
    for problem in resolved.problems:
        raise problem
    return resolved


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)
