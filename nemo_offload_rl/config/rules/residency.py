"""Rules for the residency table: its cells, and the flags that set some of them."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules.base import COLOCATED, OPTIMIZER, Conflict, Verdict, rule

TABLE = "policy.residency.table"
AUTO = "auto"
"""Value of params and optimizer_state in generate that lets the plan decide."""
FOR_REFIT = "policy.offload_optimizer_for_refit"
FOR_LOGPROB = "policy.offload_optimizer_for_logprob"
_STATE_IN_TRAIN = f"{TABLE}.train.optimizer_state"
_STATE_TYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")

# NeMo-RL's flag -> the phases whose optimizer_state cell it sets.
FLAG_PHASES: Mapping[str, tuple[str, ...]] = {FOR_LOGPROB: ("logprob",), FOR_REFIT: ("refit", "generate")}

_Cells = Mapping[str, Mapping[str, str]]


def flag_cell(enabled: bool) -> str:
    """Returns the cell that a flag sets: host, or keep (wherever the state is)."""
    return "host" if enabled else "keep"


@rule(f"{TABLE}?")
def training_has_its_state_on_the_gpu(table: _Cells | None) -> Verdict:
    """Requires training state on the GPU in train, since a step reads and writes all of it."""
    for target in ("params", "grads"):
        cell = _cell(table, "train", target)
        if cell not in (None, "gpu"):
            return f"{TABLE}.train.{target}", (
                f"must be gpu, since a training step reads and writes it there; found {show(cell)}"
            )
    cell = _cell(table, "train", "optimizer_state")
    if cell not in (None, "gpu", "streamed"):
        return (
            _STATE_IN_TRAIN,
            f"must be gpu, or streamed, which passes it through the GPU in each step; found {show(cell)}",
        )
    return None


@rule(f"{TABLE}?")
def auto_only_in_generate(table: _Cells | None) -> Verdict:
    """Refuses auto outside of generate: the plan decides there, for optimizer state in refit, too."""
    for phase in ("logprob", "refit"):
        if _cell(table, phase, "optimizer_state") == AUTO:
            return (
                f"{TABLE}.{phase}.optimizer_state",
                f"must be gpu, host or keep; set {TABLE}.generate.optimizer_state to auto, which also decides for "
                "refit",
            )
    stated = _cell(table, "refit", "optimizer_state")
    if stated is not None and _cell(table, "generate", "optimizer_state") == AUTO:
        return (
            f"{TABLE}.generate.optimizer_state",
            f"is auto, which also decides {TABLE}.refit.optimizer_state, but that is {stated}; delete one of the two",
        )
    return None


@rule(f"{TABLE}?")
def optimizer_state_is_streamed_in_training_alone(table: _Cells | None) -> Verdict:
    """Refuses streamed outside of train, and gpu for streamed state, which is never whole on the GPU."""
    for phase in ("logprob", "refit", "generate"):
        cell = _cell(table, phase, "optimizer_state")
        if cell == "streamed":
            return (
                f"{TABLE}.{phase}.optimizer_state",
                "must be gpu, host or keep, since the optimizer takes no step in this phase; set "
                f"{_STATE_IN_TRAIN} to streamed instead",
            )
        if cell == "gpu" and _is_streamed(table):
            return (
                f"{TABLE}.{phase}.optimizer_state",
                f"is gpu, but {_STATE_IN_TRAIN} is streamed, so that the GPU never holds all of it; set it to host or "
                "keep",
            )
    return None


@rule(f"{TABLE}?", f"{OPTIMIZER}.optimizer")
def streamed_state_is_adams(table: _Cells | None, optimizer: str) -> Verdict:
    """Refuses to stream other state than Adam's, the only one that can be created on the host before the first step."""
    if optimizer == "adam" or not _is_streamed(table):
        return None
    return _STATE_IN_TRAIN, f"is streamed, which needs {OPTIMIZER}.optimizer adam; found {optimizer}"


@rule(f"{TABLE}?", *(f"{OPTIMIZER}.{name}?" for name in _STATE_TYPES))
def streamed_state_has_no_scales(table: _Cells | None, *types: str | None) -> Verdict:
    """Refuses low-precision streamed state: Transformer Engine scales it by the largest element of the whole tensor."""
    if not _is_streamed(table):
        return None
    for name, found in zip(_STATE_TYPES, types, strict=True):
        if found not in (None, "float32"):
            return (
                f"{OPTIMIZER}.{name}",
                f"must be float32 with {_STATE_IN_TRAIN} streamed, since other types are scaled by the largest "
                f"element of the whole tensor; found {found}",
            )
    return None


@rule(f"{TABLE}?", f"{OPTIMIZER}.optimizer_cpu_offload?")
def state_is_streamed_or_stepped_on_the_cpu(table: _Cells | None, on_cpu: bool | None) -> Verdict:
    """Refuses streaming with the CPU optimizer, since each keeps the state on the host in its own way."""
    if not on_cpu or not _is_streamed(table):
        return None
    return (
        _STATE_IN_TRAIN,
        f"is streamed, but {OPTIMIZER}.optimizer_cpu_offload is true, which updates the state on the CPU; choose one",
    )


@rule(f"{TABLE}?")
def forward_passes_have_params_on_the_gpu(table: _Cells | None) -> Verdict:
    """Requires parameters on the GPU for log-probs, which compute with them, and for a refit, which sends them."""
    for phase, why in (("logprob", "log-probs are computed with them"), ("refit", "a refit sends them to generation")):
        cell = _cell(table, phase, "params")
        if cell not in (None, "gpu"):
            return f"{TABLE}.{phase}.params", f"must be gpu, since {why}; found {show(cell)}"
    return None


@rule(f"{TABLE}?", f"{FOR_REFIT}?", COLOCATED)
def table_agrees_with_offload_for_refit(
    table: _Cells | None, enabled: bool | None, colocated: Mapping[str, Any] | None
) -> Verdict:
    """Refuses cells that contradict the refit flag, which sets cells, too, if generation shares the policy's GPUs."""
    if enabled is None or (colocated is not None and not colocated["enabled"]):
        return None
    return _agreement(table, FOR_REFIT, enabled)


@rule(f"{TABLE}?", FOR_LOGPROB)
def table_agrees_with_offload_for_logprob(table: _Cells | None, enabled: bool) -> Verdict:
    """Refuses cells that contradict the log-prob flag, which sets cells, too."""
    return _agreement(table, FOR_LOGPROB, enabled)


@rule("policy.residency.generation_weights?", "policy.generation.backend?", COLOCATED)
def generation_weights_are_of_an_engine_that_shares_gpus(
    where: str | None, backend: str | None, colocated: Mapping[str, Any] | None
) -> Verdict:
    """Refuses a place for the weights of an engine that keeps them anyway; only vLLM on shared GPUs has a choice."""
    if where is None:
        return None
    if backend is None:
        return f"is {where}, but the recipe has no policy.generation; delete it"
    if colocated is not None and not colocated["enabled"]:
        return f"is {where}, but generation is not colocated, and its weights stay on its GPUs; set it to null"
    if backend != "vllm" and where != "host":
        return (
            f"must be host or null with policy.generation.backend {backend}, which keeps them in host memory between "
            f"generations; found {where}"
        )
    return None


def _agreement(table: _Cells | None, flag: str, enabled: bool) -> Verdict:
    written = flag_cell(enabled)
    for phase in FLAG_PHASES[flag]:
        cell = _cell(table, phase, "optimizer_state")
        if cell not in (None, written, AUTO):
            path = f"{TABLE}.{phase}.optimizer_state"
            message = (
                f"is {cell}, but {flag} is {show(enabled)}, which makes this cell {written}; delete one of the two, or "
                "make them agree"
            )
            return Conflict(path, message, also=flag)
    return None


def _is_streamed(table: _Cells | None) -> bool:
    return _cell(table, "train", "optimizer_state") == "streamed"


def _cell(table: _Cells | None, phase: str, target: str) -> Any:
    if table is None or phase not in table or target not in table[phase]:
        return None
    return table[phase][target]
