"""Rules for the CPU optimizer."""

from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules.base import OPTIMIZER, Verdict, note, rule
from nemo_offload_rl.config.rules.optimizer import STATE_TYPES, other_than_float32

SWITCH = f"{OPTIMIZER}.optimizer_cpu_offload"
FRACTION = f"{OPTIMIZER}.optimizer_offload_fraction"
OVERLAP = f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d"
PRECISION_AWARE = f"{OPTIMIZER}.use_precision_aware_optimizer"


@rule(f"{FRACTION}?", f"{SWITCH}?")
def cpu_optimizer_has_a_share(fraction: float | None, enabled: bool | None) -> Verdict:
    """Refuses a share of 0, megatron-core's default, which leaves everything on the GPU."""
    if not enabled or fraction:
        return None
    found = "is absent, which means 0" if fraction is None else f"is {show(fraction)}"
    return FRACTION, (
        f"{found}, so that {SWITCH} offloads nothing to the CPU; set it above 0, up to 1, or set {SWITCH} to false"
    )


@rule(f"{SWITCH}?", f"{OPTIMIZER}.use_distributed_optimizer")
def cpu_optimizer_is_distributed(enabled: bool | None, distributed: bool) -> Verdict:
    """Requires the distributed optimizer, since megatron-core's other optimizers ignore the CPU optimizer's switch."""
    if not enabled or distributed:
        return None
    return f"is true, which needs {OPTIMIZER}.use_distributed_optimizer; set that to true, or this to false"


@rule(f"{SWITCH}?", f"{OPTIMIZER}.decoupled_weight_decay?")
def cpu_optimizer_decouples_weight_decay(enabled: bool | None, decoupled: bool | None) -> Verdict:
    """Requires decoupled weight decay, since the CPU kernel is AdamW's."""
    if not enabled or decoupled is not False:
        return None
    return (
        f"{OPTIMIZER}.decoupled_weight_decay",
        f"is false, but with {SWITCH} weight decay is decoupled (AdamW); set it to true, or {SWITCH} to false",
    )


@rule(f"{OVERLAP}?", f"{SWITCH}?")
def overlap_is_of_the_cpu_optimizer(overlap: bool | None, enabled: bool | None) -> Verdict:
    """Refuses overlapped copies without the CPU optimizer, which is what makes these copies."""
    if not overlap or enabled:
        return None
    return f"is true, which needs {SWITCH}; set that to true, or this to false"


@rule(f"{SWITCH}?", *(f"{OPTIMIZER}.{name}?" for name in STATE_TYPES))
def cpu_optimizer_keeps_float32(enabled: bool | None, *types: str | None) -> Verdict:
    """Requires float32 optimizer state, on the CPU and for the share that stays on the GPU."""
    other = other_than_float32(types)
    if not enabled or other is None:
        return None
    name, found = other
    return (
        f"{OPTIMIZER}.{name}",
        f"must be float32 with {SWITCH}, which keeps its state in float32; found {found}: set it to float32, or "
        f"{SWITCH} to false",
    )


@note(f"{PRECISION_AWARE}", f"{SWITCH}?", f"{OPTIMIZER}.optimizer", "policy.precision")
def masters_stay_on_the_gpu(aware: bool, enabled: bool | None, optimizer: str, precision: str) -> Verdict:
    """Notes that float32 masters stay on the GPU, a setting that megatron-core's own trainer refuses."""
    if not enabled or aware or precision != "bfloat16":
        return None
    remedy = "; with true the CPU optimizer keeps them" if optimizer == "adam" else ", as always with sgd"
    return f"is false, so float32 master weights of all parameters stay on the GPU, 4 bytes each{remedy}"


@note(f"{FRACTION}?", f"{SWITCH}?")
def fractions_count_with_the_cpu_optimizer(fraction: float | None, enabled: bool | None) -> Verdict:
    """Notes that the share has no effect while the CPU optimizer is off."""
    return f"has no effect, since {SWITCH} is not true" if fraction and not enabled else None


@note(f"{OPTIMIZER}.store_param_remainders?", f"{SWITCH}?")
def the_cpu_optimizer_stores_no_remainders(store: bool | None, enabled: bool | None) -> Verdict:
    """Notes that stored remainders have no effect, since the CPU optimizer keeps whole masters."""
    return f"has no effect with {SWITCH}, which keeps full float32 master weights" if store and enabled else None
