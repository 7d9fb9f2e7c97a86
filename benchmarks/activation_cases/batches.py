"""Creates batches that depend only on the step, so that compared runs get the same ones."""

import random

import torch

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.mcore.batches import pack_bins
from nemo_offload_rl.memory.units import round_up

FEWEST, MOST = 2, 6
"""Micro-batches of a step where their number changes."""


def num_micro_batches(kind: str, step: int) -> int:
    """Returns a step's micro-batches: `kind` itself, or for "changing" each number once in five steps."""
    if kind != "changing":
        return int(kind)
    numbers = list(range(FEWEST, MOST + 1))
    random.Random(step // len(numbers)).shuffle(numbers)
    return numbers[step % len(numbers)]


def padded_lengths(rows: int, longest: int, seed: int) -> list[int]:
    """Returns the tokens of each row; the first is as long as possible, so that all runs have the same padding."""
    generator = random.Random(seed)
    return [longest, *(generator.randint(longest // 4, longest) for _ in range(rows - 1))]


def packed_lengths(num_bins: int, capacity: int, longest: int, seed: int, divisible_by: int = 1) -> list[int]:
    """Returns the tokens of samples that pack into the given number of rows.

    Args:
        num_bins: rows.
        capacity: tokens of a row.
        longest: tokens of a sample at most; a quarter of the capacity or more.
        seed: selects the lengths.
        divisible_by: samples are padded to a multiple of so many tokens.
    """
    generator = random.Random(seed)
    while True:
        lengths: list[int] = []
        for _ in range(num_bins):
            left = capacity
            while left > capacity // 8:
                lengths.append(min(left, generator.randint(capacity // 8, longest)))
                left -= lengths[-1]
        generator.shuffle(lengths)
        if len(pack_bins([round_up(length, divisible_by) for length in lengths], capacity)) == num_bins:
            return lengths


def batch(lengths: list[int], vocab_size: int, seed: int) -> BatchedData:
    """Creates random tokens; the first eighth of each row is a prompt, which is not trained on."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    columns, of_row = torch.arange(width)[None], torch.tensor(lengths)
    real = columns < of_row[:, None]
    ids = torch.randint(0, vocab_size, (len(lengths), width), generator=generator)
    return BatchedData(
        input_ids=torch.where(real, ids, 0),
        input_lengths=of_row,
        token_mask=(real & (columns >= of_row[:, None] // 8)).float(),
        sample_mask=torch.ones(len(lengths)),
    )
