"""Draws batches from a dataset in an order that depends only on the seed and the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_offload_rl.data.problem import DataError


@dataclass(frozen=True)
class DataPosition:
    """Records a loader's position: finished epochs, and samples taken from the current one."""

    epoch: int
    samples: int


START = DataPosition(epoch=0, samples=0)


class ProblemLoader[Sample]:
    """Draws batches of problems, or of pairs, epoch by epoch; leaves out an epoch's incomplete last batch.

    Attributes:
        problems: the dataset.
        position: where the next batch starts; set it to continue from another position.

    Args:
        problems: the dataset.
        shuffle: whether to shuffle each epoch.
        seed: seed of the shuffling, together with the epoch.
        noun: word for the samples in messages.
    """

    def __init__(self, problems: Sequence[Sample], shuffle: bool, seed: int, noun: str = "problems") -> None:
        self.problems = problems
        self._noun = noun
        self._shuffle = shuffle
        self._seed = seed
        self._ordered_epoch: int | None = None
        self._order = np.arange(len(problems))
        self.position = START

    def require(self, size: int, key: str) -> None:
        """Checks that the dataset has enough problems for a batch.

        Args:
            size: problems of a batch.
            key: the recipe's key with that size, for the message.

        Raises:
            DataError: the dataset has fewer problems.
        """
        num_problems = len(self.problems)
        if size > num_problems:
            raise DataError(
                f"{key} is {size}, but the training set (data.train) has only {num_problems} {self._noun}: lower it, "
                "or give more data."
            )

    def batches_per_epoch(self, size: int) -> int:
        """Returns how many batches of ``size`` problems an epoch has."""
        return len(self.problems) // size

    def next_batch(self, size: int) -> list[Sample]:
        """Returns the next ``size`` problems of the epoch, or the first of the next epoch if too few are left.

        Raises:
            DataError: the dataset has fewer problems than a batch.
        """
        num_problems = len(self.problems)
        self.require(size, "The size of a step")
        epoch, start = self.position.epoch, self.position.samples
        if start + size > num_problems:
            epoch, start = epoch + 1, 0
        rows = self._order_of(epoch)[start : start + size]
        stop = start + size
        self.position = DataPosition(epoch + 1, 0) if stop + size > num_problems else DataPosition(epoch, stop)
        return [self.problems[int(row)] for row in rows]

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._shuffle and self._ordered_epoch != epoch:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, epoch])))
            self._order = rng.permutation(len(self.problems))
            self._ordered_epoch = epoch
        return self._order
