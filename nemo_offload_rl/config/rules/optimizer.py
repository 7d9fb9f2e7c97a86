"""The optimizer and its schedule."""

from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules.base import DDP, OPTIMIZER, SCHEDULER, Verdict, rule


@rule(f"{OPTIMIZER}.bf16", "policy.precision")
def optimizer_agrees_with_precision(bf16: bool, precision: str) -> Verdict:
    """Megatron is told the precision twice."""
    expected = precision == "bfloat16"
    if bf16 == expected:
        return None
    return f"is {show(bf16)}, but policy.precision is {precision}; set it to {show(expected)}"


@rule(f"{OPTIMIZER}.min_lr", f"{OPTIMIZER}.lr")
def min_lr_is_below_lr(min_lr: float, lr: float) -> Verdict:
    """The learning rate decays."""
    return None if min_lr <= lr else f"is {min_lr}, above {OPTIMIZER}.lr ({lr})"


@rule(f"{SCHEDULER}.lr_warmup_init", f"{OPTIMIZER}.lr")
def warm_up_starts_below_lr(start: float, lr: float) -> Verdict:
    """The learning rate rises in the warm-up."""
    return None if start <= lr else f"is {start}, above {OPTIMIZER}.lr ({lr})"


@rule(f"{SCHEDULER}.lr_warmup_iters", f"{SCHEDULER}.lr_decay_iters?")
def warm_up_ends_before_decay(warmup: int, decay: int | None) -> Verdict:
    """megatron-core counts the warm-up as part of the decay."""
    if decay is None or warmup < decay:
        return None
    return f"is {warmup}, but must be below {SCHEDULER}.lr_decay_iters ({decay}), which counts the warm-up too"


@rule(f"{DDP}.overlap_param_gather", f"{OPTIMIZER}.use_distributed_optimizer", f"{DDP}.overlap_grad_reduce")
def overlapped_gather_needs_distributed_optimizer(overlap: bool, distributed: bool, overlap_reduce: bool) -> Verdict:
    """Only sharded parameters are gathered."""
    if not overlap or (distributed and overlap_reduce):
        return None
    missing = f"{OPTIMIZER}.use_distributed_optimizer" if not distributed else f"{DDP}.overlap_grad_reduce"
    return f"is true, which needs {missing} to be true"


@rule(f"{OPTIMIZER}.optimizer", f"{OPTIMIZER}.use_distributed_optimizer")
def distributed_optimizer_is_adam(optimizer: str, distributed: bool) -> Verdict:
    """megatron-core shards the state of Adam only."""
    if optimizer == "adam" or not distributed:
        return None
    return f"is {optimizer}, which needs {OPTIMIZER}.use_distributed_optimizer to be false"


@rule(f"{OPTIMIZER}.use_precision_aware_optimizer", f"{OPTIMIZER}.use_distributed_optimizer", f"{OPTIMIZER}.optimizer")
def precision_aware_optimizer_is_distributed_adam(enabled: bool, distributed: bool, optimizer: str) -> Verdict:
    """It is a feature of Transformer Engine's Adam under the distributed optimizer."""
    if not enabled or (distributed and optimizer == "adam"):
        return None
    return f"is true, which needs {OPTIMIZER}.use_distributed_optimizer true and {OPTIMIZER}.optimizer adam"
