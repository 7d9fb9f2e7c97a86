"""Rules for the residency table, and for the optimizer: on the GPU, streamed, or on the CPU."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules import base
from nemo_offload_rl.config.rules.base import COLOCATED, CPU_OPTIMIZER, OPTIMIZER, TABLE, RuleResult, note, rule

AUTO = "auto"
"""Value of params and optimizer_state in generate that lets the plan decide."""
FOR_REFIT = "policy.offload_optimizer_for_refit"
FOR_LOGPROB = "policy.offload_optimizer_for_logprob"
STATE_IN_TRAIN = f"{TABLE}.train.optimizer_state"

# NeMo-RL's flag -> the phases whose optimizer_state cell it sets.
FLAG_PHASES: Mapping[str, tuple[str, ...]] = {FOR_LOGPROB: ("logprob",), FOR_REFIT: ("refit", "generate")}

# Phase and target: the cells that it may have, and why; others may have any.
CELLS: Mapping[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("train", "params"): (("gpu",), "a training step reads and writes it there"),
    ("train", "grads"): (("gpu",), "a training step reads and writes it there"),
    ("train", "optimizer_state"): (("gpu", "streamed"), "the step needs it there, or passes it through"),
    ("logprob", "params"): (("gpu",), "log-probs are computed with them"),
    ("refit", "params"): (("gpu",), "a refit sends them to generation"),
    ("logprob", "optimizer_state"): (("gpu", "host", "keep"), "the optimizer takes no step in this phase"),
    ("refit", "optimizer_state"): (("gpu", "host", "keep"), "auto in generate also decides for refit"),
    ("generate", "optimizer_state"): (("gpu", "host", "keep", AUTO), "the optimizer takes no step in this phase"),
}

_Cells = Mapping[str, Mapping[str, str]]


def flag_cell(enabled: bool) -> str:
    """Returns the cell that a flag sets: host, or keep (wherever the state is)."""
    return "host" if enabled else "keep"


@rule(f"{TABLE}?")
def residency_table_cells(table: _Cells | None) -> RuleResult:
    """Requires cells in which their phase can run, and one decision for refit and generate."""
    for (phase, target), (allowed, why) in CELLS.items():
        cell = _cell(table, phase, target)
        path = f"{TABLE}.{phase}.{target}"
        if cell is not None and cell not in allowed:
            return path, f"must be {show_choices(allowed)}, since {why}; found {show(cell)}"
        if target == "optimizer_state" and cell == "gpu" and phase != "train" and _is_streamed(table):
            return path, f"is gpu, but {STATE_IN_TRAIN} is streamed, never whole on the GPU; set it to host or keep"
    stated, path = _cell(table, "refit", "optimizer_state"), f"{TABLE}.generate.optimizer_state"
    if stated is not None and _cell(table, "generate", "optimizer_state") == AUTO:
        return path, f"is auto, but {TABLE}.refit.optimizer_state, which that decides, too, is {stated}; delete one"
    return None


@rule(f"{TABLE}?", f"{OPTIMIZER}.optimizer", f"{CPU_OPTIMIZER}?")
def residency_streamed_optimizer(table: _Cells | None, optimizer: str, on_cpu: bool | None) -> RuleResult:
    """Refuses to stream other state than Adam's, which alone can be created on the host, or the CPU optimizer's."""
    if not _is_streamed(table) or (optimizer == "adam" and not on_cpu):
        return None
    return (
        STATE_IN_TRAIN,
        f"is streamed, which needs {OPTIMIZER}.optimizer adam and no {CPU_OPTIMIZER}; change one",
    )


@rule(f"{TABLE}?", FOR_LOGPROB, f"{FOR_REFIT}?", COLOCATED)
def residency_table_flags(
    table: _Cells | None, for_logprob: bool, for_refit: bool | None, colocated: Mapping[str, Any] | None
) -> RuleResult:
    """Refuses cells that contradict a flag, which sets cells, too; that for refits if generation shares the GPUs."""
    is_apart = colocated is not None and not colocated["enabled"]
    for flag, enabled in ((FOR_LOGPROB, for_logprob), (FOR_REFIT, None if is_apart else for_refit)):
        for phase in () if enabled is None else FLAG_PHASES[flag]:
            cell, written = _cell(table, phase, "optimizer_state"), flag_cell(bool(enabled))
            if cell not in (None, written, AUTO):
                path = f"{TABLE}.{phase}.optimizer_state"
                return path, f"is {cell}, but {flag} {show(enabled)} makes it {written}; delete one of the two"
    return None


@rule("policy.residency.generation_weights?", "policy.generation.backend?", COLOCATED)
def residency_generation_weights(
    where: str | None, backend: str | None, colocated: Mapping[str, Any] | None
) -> RuleResult:
    """Refuses a place for the weights of an engine that keeps them anyway; only vLLM on shared GPUs has a choice."""
    is_apart = colocated is not None and not colocated["enabled"]
    if (
        where is None
        or (not is_apart and (backend == "vllm" or where == "gpu"))
        or (backend == "transformers" and where == "host")
    ):
        return None
    return f"is {where}, but only an engine of vLLM on the policy's GPUs has a choice; set it to null"


def _is_streamed(table: _Cells | None) -> bool:
    return _cell(table, "train", "optimizer_state") == "streamed"


def _cell(table: _Cells | None, phase: str, target: str) -> Any:
    return None if table is None or phase not in table else table[phase].get(target)


STATE_TYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_FRACTION = f"{base.OPTIMIZER}.optimizer_offload_fraction"


@rule(f"{base.OPTIMIZER}.bf16", "policy.precision")
def optimizer_bf16(bf16: bool, precision: str) -> RuleResult:
    """Requires the optimizer's bf16 to agree with policy.precision."""
    if bf16 == (precision == "bfloat16"):
        return None
    return f"is {show(bf16)}, but policy.precision is {precision}; set it to {show(not bf16)}"


@rule(f"{base.OPTIMIZER}.optimizer", base.DISTRIBUTED, f"{base.CPU_OPTIMIZER}?")
def optimizer_distributed(optimizer: str, distributed: bool, on_cpu: bool | None) -> RuleResult:
    """Refuses other optimizers: megatron-core shards only the state of Adam and of its CPU optimizer."""
    if optimizer == "adam" or not distributed or on_cpu:
        return None
    return f"is {optimizer}, which needs {base.DISTRIBUTED} to be false; set that to false"


@rule(
    base.PRECISION_AWARE,
    f"{base.CPU_OPTIMIZER}?",
    f"{STATE_IN_TRAIN}?",
    *(f"{base.OPTIMIZER}.{name}?" for name in STATE_TYPES),
)
def optimizer_state_types(aware: bool, on_cpu: bool | None, state: str | None, *types: str | None) -> RuleResult:
    """Refuses low-precision state where it is not precision-aware, or its scales are of the whole tensor."""
    causes = (
        (not aware, f"without {base.PRECISION_AWARE}", STATE_TYPES),
        (on_cpu, f"with {base.CPU_OPTIMIZER}", STATE_TYPES),
        (state == "streamed", f"with {STATE_IN_TRAIN} streamed", STATE_TYPES[1:]),
    )
    found = dict(zip(STATE_TYPES, types, strict=True))
    for applies, when, names in causes:
        other = next((name for name in names if found[name] not in (None, "float32")), None)
        if applies and other:
            return f"{base.OPTIMIZER}.{other}", f"must be float32 {when}; found {found[other]}: change either"
    return None


@rule(f"{_FRACTION}?", f"{base.CPU_OPTIMIZER}?")
def cpu_optimizer_fraction(fraction: float | None, enabled: bool | None) -> RuleResult:
    """Refuses a share of 0, megatron-core's default, which leaves everything on the GPU."""
    if not enabled or fraction:
        return None
    return f"is {show(fraction or 0)}, so that {base.CPU_OPTIMIZER} offloads nothing; set it above 0, up to 1"


@note(f"{base.OPTIMIZER}.clip_grad", "policy.max_grad_norm")
def optimizer_clip_grad(clip: float, norm: float | None) -> RuleResult:
    """Notes that clip_grad differs from max_grad_norm, since the optimizer reads only clip_grad."""
    if norm is None or clip == norm:
        return None
    return f"{clip} is the norm that gradients are clipped to; policy.max_grad_norm ({norm}) has no effect"
