"""Settings of NeMo-RL's recipes that are read otherwise than written, where a run's numbers stay the same.

docs/decisions/adapted-recipes.md says what is adapted, what is refused, and why.
"""

import math

from nemo_offload_rl.config.rules.base import DDP, DIVISOR, MEGATRON, SECTION, TP, Adapted, adaptation

SEQUENCE_PARALLEL = f"{MEGATRON}.sequence_parallel"


@adaptation(SEQUENCE_PARALLEL, TP)
def sequence_parallel_counts_with_tensor_parallel(enabled: bool, tp: int) -> Adapted | None:
    """megatron-core refuses it alone; NeMo-RL's recipes have it on."""
    return Adapted(SEQUENCE_PARALLEL, False, f"is off, since {TP} is 1") if enabled and tp == 1 else None


@adaptation(SEQUENCE_PARALLEL, TP, DIVISOR)
def sequences_are_padded_to_their_parts(enabled: bool, tp: int, multiple: int) -> Adapted | None:
    """Each tensor-parallel rank has an equal part of a row; padding has no part in a loss."""
    if not enabled or multiple % tp == 0:
        return None
    padded = math.lcm(multiple, tp)
    return Adapted(
        DIVISOR, padded, f"is {padded} in place of {multiple}: {SEQUENCE_PARALLEL} splits rows over {TP} {tp} ranks"
    )


@adaptation(f"{DDP}.overlap_param_gather", f"{DDP}.overlap_grad_reduce")
def gathers_overlap_with_reductions_alone(gather: bool, reduce: bool) -> Adapted | None:
    """megatron-core dispatches both by the same buckets; without, parameters are gathered in the optimizer's step."""
    if not gather or reduce:
        return None
    return Adapted(f"{DDP}.overlap_param_gather", False, f"is off, since {DDP}.overlap_grad_reduce is false")


@adaptation(f"{SECTION}.val_period?", SECTION)
def no_period_is_no_validation(period: int | None, _: object) -> Adapted | None:
    """NeMo-RL's recipes write -1 as well as 0."""
    return Adapted(f"{SECTION}.val_period", 0, None) if period == -1 else None
