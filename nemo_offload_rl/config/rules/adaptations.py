"""Adapts settings of NeMo-RL's recipes that can be read differently without changing a run's numbers.

docs/decisions/adapted-recipes.md says what is adapted, what is refused, and why.
"""

import math
from typing import Any

from nemo_offload_rl.config.rules import base
from nemo_offload_rl.config.rules.base import Adapted, adaptation

ASYNC_ENGINE = "policy.generation.vllm_cfg.async_engine"
SEQUENCE_PARALLEL = f"{base.MEGATRON}.sequence_parallel"


@adaptation(SEQUENCE_PARALLEL, base.TP)
def sequence_parallel_without_tensor_parallel(enabled: bool, tp: int) -> Adapted | None:
    """Turns off sequence parallelism without tensor parallelism.

    NeMo-RL's recipes have this combination, and megatron-core refuses it.
    """
    return Adapted(SEQUENCE_PARALLEL, False, f"is off, since {base.TP} is 1") if enabled and tp == 1 else None


@adaptation(SEQUENCE_PARALLEL, base.TP, base.DIVISOR)
def sequence_parallel_divisor(enabled: bool, tp: int, multiple: int) -> Adapted | None:
    """Rounds the padding multiple up, so that rows split evenly over tensor-parallel ranks; no loss counts padding."""
    if not enabled or multiple % tp == 0:
        return None
    padded = math.lcm(multiple, tp)
    return Adapted(
        base.DIVISOR,
        padded,
        f"is {padded} instead of {multiple}, since {SEQUENCE_PARALLEL} splits rows over the {tp} ranks of {base.TP}",
    )


@adaptation(f"{base.DDP}.overlap_param_gather", f"{base.DDP}.overlap_grad_reduce")
def ddp_overlap_param_gather(gather: bool, reduce: bool) -> Adapted | None:
    """Turns off the overlapped gather of parameters without an overlapped reduction of gradients.

    megatron-core dispatches both by the same buckets; without overlap, the optimizer's step gathers the parameters.
    """
    if not gather or reduce:
        return None
    return Adapted(f"{base.DDP}.overlap_param_gather", False, f"is off, since {base.DDP}.overlap_grad_reduce is false")


@adaptation(f"{base.SECTION}.val_period?", base.SECTION)
def val_period(period: int | None, _: object) -> Adapted | None:
    """Reads a period of -1 as 0, since NeMo-RL's recipes have both for no validation."""
    return Adapted(f"{base.SECTION}.val_period", 0, None) if period == -1 else None


@adaptation(ASYNC_ENGINE)
def vllm_async_engine(enabled: bool) -> Adapted | None:
    """Turns off vLLM's asynchronous engine, whose scheduler batches and samples a step's requests in the same way."""
    line = (
        "is off: a step submits all its requests at once, and the synchronous engine samples from the same distribution"
    )
    return Adapted(ASYNC_ENGINE, False, line) if enabled else None


@adaptation(base.REFIT_TRANSPORT, base.COLOCATED)
def refit_transport(transport: str | None, colocated: dict[str, Any] | None) -> Adapted | None:
    """Replaces the transport by a broadcast, since all of NeMo-RL's transports bring the same bits.

    A rule refuses transports where policy and generation share GPUs.
    """
    if transport is None or colocated is None or colocated["enabled"]:
        return None
    return Adapted(
        base.REFIT_TRANSPORT,
        None,
        f"is null instead of {transport}: refits broadcast the full weights, bit for bit the same",
    )
