"""What is made of what was measured: overhead, R, the link's bound, and the bars; plain numbers in and out."""

import statistics
from collections.abc import Sequence

OVERHEAD_BAR_PERCENT = 0.3
R_BAR = 0.99
MOE_BAR_PERCENT = 3.0
LINK_MARGIN = 1.1
# Graphs with offloading against eager with offloading: at most so much slower.
GRAPH_BARS_PERCENT = {"attn": 3.0, "attn, mlp": 10.0, "attn, moe_router": 0.0}


def overhead_percent(base: Sequence[float], ours: Sequence[float]) -> float:
    """By how much the median of `ours` is above that of `base`, in percent."""
    return (statistics.median(ours) / statistics.median(base) - 1) * 100


def recovered_share(plain_peak: int, peak: int, should_leave: float) -> float | None:
    """R: the part of what should have left at the peak by which the peak fell.

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
    """The overhead that no schedule can avoid, in percent of the plain step.

    The copies of a micro-batch run beside its forward pass, one way, and what they exceed it by is waited for.

    Args:
        moved: bytes of a micro-batch, one way.
        bytes_per_s: of the link, one way.
        forward_s: a micro-batch's forward pass, nothing offloaded.
        num_micro_batches: of a step.
        plain_step_s: a step, nothing offloaded.
    """
    excess = max(0.0, moved / bytes_per_s - forward_s)
    return excess * num_micro_batches / plain_step_s * 100


def overhead_bar_percent(*, is_moe: bool, micro_batch: int, bound_percent: float) -> float | None:
    """The most overhead that a run without graphs may have, where there is a bar.

    A mixture of experts: 3%, or 1.1 times the link's bound where that is more. A dense model: 0.3% in micro-batches of
    4; in those of 1, and only where the link is the limit, 1.1 times its bound.
    """
    at_link = LINK_MARGIN * bound_percent
    if is_moe:
        return max(MOE_BAR_PERCENT, at_link)
    if micro_batch == 4:
        return OVERHEAD_BAR_PERCENT
    return at_link if micro_batch == 1 and bound_percent > 0 else None


def next_length(fits: dict[int, bool], start: int, step: int) -> int | None:
    """Which sequence length to try next: doubling from `start` until one does not fit, then bisection.

    Args:
        fits: what is known of lengths.
        start: the first, a multiple of `step`.
        step: lengths are multiples of it.

    Returns:
        None once the longest that fits is known to within a step.
    """
    longest = max((length for length, fit in fits.items() if fit), default=0)
    too_long = min((length for length, fit in fits.items() if not fit), default=None)
    if too_long is None:
        return 2 * longest if longest else start
    gap = (too_long - longest) // step
    return longest + gap // 2 * step if gap > 1 else None
