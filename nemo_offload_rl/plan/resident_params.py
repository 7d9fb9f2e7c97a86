"""Keeps the policy's parameters on the GPU beside vLLM where both fit: nothing moves that need not."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from nemo_offload_rl.config.rules.residency import AUTO, TABLE
from nemo_offload_rl.memory.units import show_gib
from nemo_offload_rl.plan.engine_targets import has_vllm_beside_it
from nemo_offload_rl.plan.generation import share_beside_policy
from nemo_offload_rl.plan.planner import PlannedRun
from nemo_offload_rl.residency.table import Phase, Target

CELL = f"{TABLE}.{Phase.GENERATE}.{Target.PARAMS}"


def with_resident_params(
    config: Mapping[str, Any], plan_of: Callable[[Mapping[str, Any]], PlannedRun | None], gpu_bytes: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Decide where parameters are during generation, where the recipe leaves that open or says auto.

    Args:
        config: a validated recipe, resolved for the ranks' machine; it is left as it is.
        plan_of: plans such a recipe; None where the model's sizes are not known.
        gpu_bytes: memory of the smallest GPU; None where that is not known.

    Returns:
        The config, and a line where parameters stay on the GPU.
    """
    policy = config["policy"]
    table = policy["residency"]["table"] or {}
    cells = table.get(Phase.GENERATE) or {}
    is_open = Target.PARAMS not in cells or cells[Target.PARAMS] == AUTO
    if not has_vllm_beside_it(policy) or not is_open or gpu_bytes is None:  # they stay on GPUs of their own
        return config, []
    resident = copy.deepcopy(dict(config))
    cells = {**cells, Target.PARAMS.value: "gpu"}
    resident["policy"]["residency"]["table"] = {**table, Phase.GENERATE.value: cells}
    planned = plan_of(resident)
    if planned is None or planned.engine is None:
        return config, []
    if planned.engine.share_of(gpu_bytes) > share_beside_policy(planned.plan, planned.engine, gpu_bytes):
        return config, []
    params = max(rank.target_bytes[Target.PARAMS] for rank in planned.plan.ranks)
    return resident, [
        f"the policy's parameters, {show_gib(params)} GiB a rank, stay on the GPU during generation, since they fit "
        f"there beside vLLM; {CELL}=host moves them"
    ]
