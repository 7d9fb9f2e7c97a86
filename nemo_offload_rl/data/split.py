"""Splits off a part of the training data as validation data."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from nemo_offload_rl.data.datasets import selected
from nemo_offload_rl.data.errors import DataError


def split_validation[Sample](
    samples: Sequence[Sample], size: float, seed: int
) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Draws validation data from the training data, as ``train_test_split`` of ``datasets``, and so NeMo-RL, does.

    The same samples, size and seed always give the same two parts; no sample is in both.

    Args:
        samples: the N samples.
        size: size of the validation data: a share (a float below 1, rounded up to whole samples) or a number of
            samples; 0 draws none.
        seed: seed of the draw.

    Returns:
        Training data and validation data, each in the order in which they were drawn.

    Raises:
        DataError: nothing is left to train on.
    """
    if size == 0:
        return samples, []
    num_validation = ceil(size * len(samples)) if isinstance(size, float) else size
    if num_validation >= len(samples):
        raise DataError(
            f"data.train.split_validation_size is {size}, which takes {num_validation} samples for validation, but "
            f"data.train has only {len(samples)}: lower it, or give more data."
        )
    order = np.random.default_rng(seed).permutation(len(samples))
    return selected(samples, order[num_validation:]), selected(samples, order[:num_validation])
