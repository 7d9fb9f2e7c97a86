"""Decides whether the policy's state stays on the GPU beside vLLM, which saves moving it where both fit."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_offload_rl.config.rules.residency import AUTO, TABLE
from nemo_offload_rl.memory.units import show_gib
from nemo_offload_rl.plan.engine_targets import colocates_vllm
from nemo_offload_rl.plan.generation import refit_fits, share_beside_policy
from nemo_offload_rl.plan.planner import PlannedRun
from nemo_offload_rl.residency.table import Phase, Placement, Target

PARAMS_CELL = f"{TABLE}.{Phase.GENERATE}.{Target.PARAMS}"
STATE_CELL = f"{TABLE}.{Phase.GENERATE}.{Target.OPTIMIZER_STATE}"
DECIDED_CELLS = (PARAMS_CELL, STATE_CELL, f"{TABLE}.{Phase.REFIT}.{Target.OPTIMIZER_STATE}")
"""Paths, in a recipe, of the cells that this module decides."""

_Config = Mapping[str, Any]


def with_resident_state(
    config: _Config, plan_of: Callable[[_Config], PlannedRun | None], gpu_bytes: int | None
) -> tuple[_Config, list[str]]:
    """Decides where parameters and optimizer state are during generation, where the recipe leaves that open.

    Parameters stay on the GPU if their cell is absent or auto, and they fit. If parameters did not fit, optimizer state
    is not considered. Otherwise it stays on the GPU if it fits and the recipe leaves it open: its cell is auto, or the
    recipe sets neither the cell nor offload_optimizer_for_refit and does not move parameters.

    Args:
        config: a validated recipe, resolved for the ranks' machine; not modified.
        plan_of: plans such a recipe; returns None where the model's sizes are not known.
        gpu_bytes: memory of the smallest GPU; None where that is not known.

    Returns:
        The config, and a line for each target that stays on the GPU.
    """
    policy = config["policy"]
    if not colocates_vllm(policy) or gpu_bytes is None:  # with vLLM on other GPUs, nothing needs to move
        return config, []
    lines = []
    if _cell(policy, Phase.GENERATE, Target.PARAMS) in (None, AUTO):
        resident = _with_cells(config, (Phase.GENERATE,), Target.PARAMS, "gpu")
        planned = plan_of(resident)
        if planned is None or not _fits(planned, gpu_bytes):
            return config, []
        config = resident
        lines.append(_line("parameters", Target.PARAMS, planned, f"{PARAMS_CELL}=host offloads them"))
    if _leaves_state_to_the_plan(policy):
        resident = _with_cells(config, (Phase.REFIT, Phase.GENERATE), Target.OPTIMIZER_STATE, "keep")
        planned = plan_of(resident)
        if planned is not None and _has_state(planned) and _fits(planned, gpu_bytes):
            config = resident
            lines.append(_line("optimizer state", Target.OPTIMIZER_STATE, planned, f"{STATE_CELL}=host offloads it"))
    return config, lines


def _leaves_state_to_the_plan(policy: Mapping[str, Any]) -> bool:
    phases = (Phase.REFIT, Phase.GENERATE)
    if any(_cell(policy, phase, Target.OPTIMIZER_STATE) == AUTO for phase in phases):
        return True
    says_where = any(_cell(policy, phase, Target.OPTIMIZER_STATE) for phase in phases)
    moves_params = _cell(policy, Phase.GENERATE, Target.PARAMS) == Placement.HOST
    return not says_where and not moves_params and policy["offload_optimizer_for_refit"] is None


def _cell(policy: Mapping[str, Any], phase: Phase, target: Target) -> Any:
    cells = (policy["residency"]["table"] or {}).get(phase) or {}
    return cells.get(target)


def _with_cells(config: _Config, phases: Sequence[Phase], target: Target, cell: str) -> _Config:
    changed = copy.deepcopy(dict(config))
    table = changed["policy"]["residency"]["table"] or {}
    of_phases = {phase.value: {**(table.get(phase) or {}), target.value: cell} for phase in phases}
    changed["policy"]["residency"]["table"] = {**table, **of_phases}
    return changed


def _has_state(planned: PlannedRun) -> bool:
    """Returns whether a rank has optimizer state that could stay on the GPU."""
    plan = planned.plan
    return not plan.streams_optimizer_state and any(rank.target_bytes[Target.OPTIMIZER_STATE] for rank in plan.ranks)


def _fits(planned: PlannedRun, gpu_bytes: int) -> bool:
    """Returns whether the policy's state fits on the GPU beside the engine, in generation and in a refit."""
    plan, engine = planned.plan, planned.engine
    return (
        engine is not None
        and refit_fits(plan, engine, gpu_bytes)
        and engine.share_of(gpu_bytes) <= share_beside_policy(plan, engine, gpu_bytes)
    )


def _line(name: str, target: Target, planned: PlannedRun, remedy: str) -> str:
    nbytes = max(rank.target_bytes[target] for rank in planned.plan.ranks)
    subject = "stay" if target is Target.PARAMS else "stays"
    pronoun = "they fit" if target is Target.PARAMS else "it fits"
    return (
        f"the policy's {name}, {show_gib(nbytes)} GiB a rank, {subject} on the GPU during generation, since {pronoun} "
        f"there together with vLLM; {remedy}"
    )
