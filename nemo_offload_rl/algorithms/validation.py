"""Evaluates the loss of a validation set, batch by batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from nemo_offload_rl.data.batch import BatchedData, GlobalCounts, LossFunction
from nemo_offload_rl.run.algorithm import Policy

logger = logging.getLogger(__name__)


def num_in_whole_batches(most: int, batch_size: int) -> int:
    """Returns how many samples count: as in NeMo-RL, ``most`` rounded down to whole batches, where it has one."""
    return most // batch_size * batch_size or most


def in_batches[Sample](samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """Yields consecutive parts of a validation set; the last may be smaller."""
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def evaluate_batches(
    policy: Policy,
    batches: Sequence[BatchedData],
    loss_fn: LossFunction,
    *,
    mbs: int,
    loss_is_mean_of: Literal["valid_toks", "valid_seqs"],
) -> dict[str, Any]:
    """Returns loss and metrics of one batch with the rows of all, as ``Policy.evaluate`` does; NaN if no row counts.

    Args:
        policy: the policy.
        batches: one or more.
        loss_fn: its metrics must be means over samples; of others, the result means nothing.
        mbs: samples of a micro-batch.
        loss_is_mean_of: the field of ``GlobalCounts`` that the loss divides by.
    """
    results = [policy.evaluate(batch, loss_fn, mbs=mbs) for batch in batches]
    counts = [GlobalCounts.of(batch) for batch in batches]
    samples = [float(count.valid_seqs) for count in counts]
    if not any(float(count.valid_toks) for count in counts):
        logger.warning(
            "The validation measures nothing: none of its samples counts, since all are longer than "
            "data.max_input_seq_length or have no token to train; raise that limit, or take other validation data."
        )
    return {
        "loss": _mean([result["loss"] for result in results], [float(getattr(one, loss_is_mean_of)) for one in counts]),
        "metrics": {
            name: _mean([result["metrics"][name] for result in results], samples) for name in results[0]["metrics"]
        },
    }


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else math.nan
