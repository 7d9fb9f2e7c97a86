"""Rules for the optimizer, on the GPU, streamed, or on the CPU."""

from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules import base
from nemo_offload_rl.config.rules.base import RuleResult, note, rule
from nemo_offload_rl.config.rules.residency import STATE_IN_TRAIN

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
