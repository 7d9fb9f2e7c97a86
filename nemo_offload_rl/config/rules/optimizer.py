"""Rules for the optimizer and its schedule."""

import struct
from collections.abc import Sequence

from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules.base import DDP, OPTIMIZER, SCHEDULER, Verdict, rule

_SMALLEST_NORMAL = 2.0**-126  # of float32; GPUs flush smaller values to 0
STATE_TYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@rule(f"{OPTIMIZER}.bf16", "policy.precision")
def optimizer_agrees_with_precision(bf16: bool, precision: str) -> Verdict:
    """Requires the optimizer's bf16 to agree with policy.precision."""
    expected = precision == "bfloat16"
    if bf16 == expected:
        return None
    return f"is {show(bf16)}, but policy.precision is {precision}; set it to {show(expected)}"


@rule(f"{OPTIMIZER}.min_lr", f"{OPTIMIZER}.lr")
def min_lr_is_below_lr(min_lr: float, lr: float) -> Verdict:
    """Refuses a min_lr above lr, since the learning rate decays."""
    if min_lr <= lr:
        return None
    return (
        f"is {min_lr}, above {OPTIMIZER}.lr ({lr}), from which the learning rate decays to it; set it to {lr} or less"
    )


@rule(f"{SCHEDULER}.lr_warmup_init", f"{OPTIMIZER}.lr")
def warm_up_starts_below_lr(start: float, lr: float) -> Verdict:
    """Refuses an initial learning rate above lr, since the warm-up increases it."""
    if start <= lr:
        return None
    return f"is {start}, above {OPTIMIZER}.lr ({lr}), to which the warm-up raises it; set it to {lr} or less"


@rule(f"{SCHEDULER}.lr_warmup_iters", f"{SCHEDULER}.lr_decay_iters?")
def warm_up_ends_before_decay(warmup: int, decay: int | None) -> Verdict:
    """Requires a warm-up shorter than the decay, in which megatron-core includes it."""
    if decay is None or warmup < decay:
        return None
    return (
        f"is {warmup}, but must be below {SCHEDULER}.lr_decay_iters ({decay}), which includes the warm-up; lower it, "
        "or raise that"
    )


@rule(f"{DDP}.overlap_param_gather", f"{OPTIMIZER}.use_distributed_optimizer")
def overlapped_gather_needs_distributed_optimizer(overlap: bool, distributed: bool) -> Verdict:
    """Refuses an overlapped gather without sharded parameters to gather."""
    if not overlap or distributed:
        return None
    return f"is true, which needs {OPTIMIZER}.use_distributed_optimizer to be true; set that to true, or this to false"


@rule(f"{OPTIMIZER}.optimizer", f"{OPTIMIZER}.use_distributed_optimizer", f"{OPTIMIZER}.optimizer_cpu_offload?")
def distributed_optimizer_is_adam(optimizer: str, distributed: bool, on_cpu: bool | None) -> Verdict:
    """Refuses other optimizers: megatron-core shards only the state of Adam and of its CPU optimizer."""
    if optimizer == "adam" or not distributed or on_cpu:
        return None
    return (
        f"is {optimizer}, which needs {OPTIMIZER}.use_distributed_optimizer to be false, since megatron-core shards "
        "only Adam's state; set that to false"
    )


@rule(f"{OPTIMIZER}.use_precision_aware_optimizer", f"{OPTIMIZER}.use_distributed_optimizer", f"{OPTIMIZER}.optimizer")
def precision_aware_optimizer_is_distributed_adam(enabled: bool, distributed: bool, optimizer: str) -> Verdict:
    """Requires Adam and the distributed optimizer, under which Transformer Engine has this feature."""
    if not enabled or (distributed and optimizer == "adam"):
        return None
    return (
        f"is true, which needs {OPTIMIZER}.use_distributed_optimizer true and {OPTIMIZER}.optimizer adam; set these, "
        "or this to false"
    )


@rule(f"{OPTIMIZER}.adam_beta1", f"{OPTIMIZER}.optimizer")
def first_moment_moves(beta: float, optimizer: str) -> Verdict:
    """Refuses a decay of the first moment that is 1 in float32, in which Adam's kernels compute."""
    return _moves(beta, optimizer)


@rule(f"{OPTIMIZER}.adam_beta2", f"{OPTIMIZER}.optimizer")
def second_moment_moves(beta: float, optimizer: str) -> Verdict:
    """Refuses a decay of the second moment that is 1 in float32, in which Adam's kernels compute."""
    return _moves(beta, optimizer)


def _moves(beta: float, optimizer: str) -> Verdict:
    if optimizer != "adam" or _float32(beta) < 1:
        return None
    return (
        "rounds to 1 in float32, in which Adam computes, so that the moment would stay 0; set it to at most 0.9999999; "
        f"found {beta!r}"
    )


@rule(f"{OPTIMIZER}.adam_eps", f"{OPTIMIZER}.optimizer")
def adam_eps_is_not_lost(eps: float, optimizer: str) -> Verdict:
    """Refuses an eps that is 0 in float32: the update of a parameter without a gradient is divided by eps alone."""
    if optimizer != "adam" or eps >= _SMALLEST_NORMAL:
        return None
    return (
        "counts as 0 in float32, in which Adam computes, so that parameters with a gradient of 0 would become NaN; "
        f"set it to 1e-8; found {eps!r}"
    )


@rule(f"{OPTIMIZER}.lr", f"{SCHEDULER}.start_weight_decay", f"{SCHEDULER}.end_weight_decay")
def decay_keeps_signs(lr: float, start: float, end: float) -> Verdict:
    """Refuses lr x weight decay above 1: a step multiplies weights by 1 minus this, which would flip their signs."""
    if lr * max(start, end) <= 1:
        return None
    name = "start_weight_decay" if start >= end else "end_weight_decay"
    return (
        f"is {lr}, and with {SCHEDULER}.{name} ({max(start, end)}) lr x weight decay is above 1, so that each "
        "optimizer step would flip the sign of every weight; lower either"
    )


@rule(f"{OPTIMIZER}.decoupled_lr?", f"{OPTIMIZER}.decoupled_min_lr?")
def decoupled_rates_descend(lr: float | None, min_lr: float | None) -> Verdict:
    """Requires the same of decoupled_lr and decoupled_min_lr as of lr and min_lr."""
    if lr is not None and lr <= 0:
        return f"must be above 0, or null for none; found {lr}"
    if min_lr is not None and (lr is None or not 0 <= min_lr <= lr):
        return (
            f"{OPTIMIZER}.decoupled_min_lr",
            f"must be from 0 to {OPTIMIZER}.decoupled_lr ({show(lr)}); found {min_lr}",
        )
    return None


@rule(f"{OPTIMIZER}.grad_norm_skip_threshold?")
def some_norms_are_not_skipped(threshold: float | None) -> Verdict:
    """Refuses a threshold of 0 or less, since gradients with a larger norm are not applied."""
    return None if threshold is None or threshold > 0 else f"must be above 0; found {threshold}"


@rule(
    f"{OPTIMIZER}.use_precision_aware_optimizer",
    *(f"{OPTIMIZER}.{name}?" for name in STATE_TYPES),
)
def types_of_state_need_precision_aware_optimizer(enabled: bool, *types: str | None) -> Verdict:
    """Refuses other dtypes than float32 for the state of an optimizer that is not precision-aware."""
    other = other_than_float32(types)
    if enabled or other is None:
        return None
    name, found = other
    return (
        f"{OPTIMIZER}.{name}",
        f"must be float32 without {OPTIMIZER}.use_precision_aware_optimizer; found {found}: set it to float32, or that "
        "to true",
    )


def other_than_float32(types: Sequence[str | None]) -> tuple[str, str] | None:
    """Returns the name and dtype of the first part of the optimizer state that is not float32; None if all are.

    Args:
        types: the values of `STATE_TYPES` in this order; None is float32.
    """
    named = zip(STATE_TYPES, types, strict=True)
    return next(((name, dtype) for name, dtype in named if dtype not in (None, "float32")), None)


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
