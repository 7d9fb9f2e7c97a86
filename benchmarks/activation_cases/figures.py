"""Computes overhead, R, the link's bound and the bars; plain numbers in and out."""

import statistics
from collections.abc import Mapping, Sequence

OVERHEAD_BAR_PERCENT = 0.3
R_BAR = 0.99
MOE_BAR_PERCENT = 3.0
LINK_MARGIN = 1.1
# How much slower graphs may be than eager steps, both with offloading.
GRAPH_BARS_PERCENT = {"attn": 3.0, "attn, mlp": 10.0, "attn, moe_router": 0.0}


def overhead_percent(base: Sequence[float], ours: Sequence[float]) -> float:
    """Returns by how many percent the median of `ours` is above that of `base`."""
    return (statistics.median(ours) / statistics.median(base) - 1) * 100


def recovered_share(plain_peak: int, peak: int, should_leave: float) -> float | None:
    """Returns R: the fall of the peak as a share of the bytes that should be offloaded at the peak.

    Args:
        plain_peak: bytes of the step without offloading.
        peak: with it.
        should_leave: distinct bytes, of all micro-batches whose backward pass is to come at the peak, that the manager
            has not chosen to keep. With one pipeline stage that is one micro-batch, at the end of its forward pass.

    Returns:
        None if nothing was to leave.
    """
    return (plain_peak - peak) / should_leave if should_leave else None


def link_bound_percent(
    moved: float, bytes_per_s: float, forward_s: float, *, num_micro_batches: int, plain_step_s: float
) -> float:
    """Returns the overhead that no schedule can avoid, in percent of the plain step.

    The copies of a micro-batch run one way beside its forward pass up to the logits; the stream waits for the time by
    which they take longer.

    Args:
        moved: bytes of a micro-batch, one way.
        bytes_per_s: of the link, one way.
        forward_s: a micro-batch's forward pass up to the logits, nothing offloaded.
        num_micro_batches: of a step.
        plain_step_s: a step, nothing offloaded.
    """
    excess = max(0.0, moved / bytes_per_s - forward_s)
    return excess * num_micro_batches / plain_step_s * 100


def overhead_bar_percent(*, is_moe: bool, micro_batch: int, bound_percent: float) -> float | None:
    """Returns the most overhead that a run without graphs may have, or None where there is no bar.

    A mixture of experts: 3%, or 1.1 times the link's bound where that is more. A dense model: 0.3% in micro-batches of
    4; in those of 1, and only where the link is the limit, 1.1 times its bound.
    """
    at_link = LINK_MARGIN * bound_percent
    if is_moe:
        return max(MOE_BAR_PERCENT, at_link)
    if micro_batch == 4:
        return OVERHEAD_BAR_PERCENT
    return at_link if micro_batch == 1 and bound_percent > 0 else None


def forward_bar_ms(*, is_moe: bool, micro_batch: int, link_ms: float, forward_ms: float) -> float | None:
    """Returns the longest time for an offloaded forward pass up to the logits, or None where there is no bar.

    Within 10% of the link's time: a dense model in micro-batches of 1, where the link is the limit. The overhead of the
    step has the stricter bar there: 10% more than what the link's time exceeds the plain forward pass by.
    """
    return LINK_MARGIN * link_ms if not is_moe and micro_batch == 1 and link_ms > forward_ms else None


def next_length(fills: Mapping[int, float | None], start: int, step: int) -> int | None:
    """Returns the sequence length to try next: the expected limit, then bisection after one that does not fit.

    Args:
        fills: of lengths that were tried, the part that they filled of the memory which a model at rest leaves free;
            None where it was not enough.
        start: the first, a multiple of `step`.
        step: lengths are multiples of it.

    Returns:
        None once the longest that fits is known to within a step.
    """
    longest, fill = max(((length, fill) for length, fill in fills.items() if fill is not None), default=(0, 1.0))
    too_long = min((length for length, fill in fills.items() if fill is None), default=None)
    if not fills:
        return start
    promised = max(longest + step * 2 ** max(0, len(fills) - 2), int(longest / fill) // step * step)
    if too_long is None:
        return promised
    gap = (too_long - longest) // step
    if gap <= 1:
        return None
    return promised if longest and promised < too_long else longest + gap // 2 * step
