"""Settings of NeMo-RL's recipes that are read otherwise than written, where a run's numbers stay the same.

docs/decisions/adapted-recipes.md says what is adapted, what is refused, and why.
"""

import math
from typing import Any

from nemo_offload_rl.config.rules.base import (
    COLOCATED,
    DDP,
    DIVISOR,
    MEGATRON,
    REFIT_TRANSPORT,
    SECTION,
    TP,
    Adapted,
    adaptation,
)

ASYNC_ENGINE = "policy.generation.vllm_cfg.async_engine"
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


@adaptation(ASYNC_ENGINE)
def a_steps_requests_come_at_once(enabled: bool) -> Adapted | None:
    """VLLM's scheduler batches and samples them alike with and without its asynchronous engine."""
    line = "is off: a step's requests come at once, and the synchronous engine samples them from the same distribution"
    return Adapted(ASYNC_ENGINE, False, line) if enabled else None


@adaptation(REFIT_TRANSPORT, COLOCATED)
def weights_are_broadcast_to_other_gpus(transport: str | None, colocated: dict[str, Any] | None) -> Adapted | None:
    """Each of NeMo-RL's transports brings all weights bit for bit; a rule refuses it where GPUs are shared."""
    if transport is None or colocated is None or colocated["enabled"]:
        return None
    return Adapted(
        REFIT_TRANSPORT, None, f"is null in place of {transport}: whole weights are broadcast, the same bits"
    )
