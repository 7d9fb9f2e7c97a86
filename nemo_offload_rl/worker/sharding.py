"""Deals a global batch out to data-parallel ranks, and puts their results back in order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.config.megatron import EXPERT_REPLICA_SIZES, REPLICA_SIZES, data_parallel_size, megatron_field
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.data.batch import BatchedData


@dataclass(frozen=True)
class InferenceShards:
    """Holds a batch of any size as one shard per data-parallel rank, each of as many micro-batches of one size.

    Attributes:
        shards: One per rank; filler rows have `sample_mask` 0, if the batch has that column.
        num_rows: How many leading rows of each shard are the batch's own.
        mbs: Groups of rows of a micro-batch, which divides every shard; without grouping each row is a group.
    """

    shards: list[BatchedData]
    num_rows: list[int]
    mbs: int

    def gather(self, results: Sequence[BatchedData]) -> BatchedData:
        """Returns the ranks' results, given in rank order, as one batch in the order of the original rows."""
        own = [result.slice(0, rows) for result, rows in zip(results, self.num_rows, strict=True) if rows]
        return BatchedData.concat(own)


def shard_for_training(data: BatchedData, *, gbs: int, mbs: int, dp_size: int) -> list[BatchedData]:
    """Deal out every chunk of `gbs` samples contiguously: rank r takes [r x gbs/dp, (r + 1) x gbs/dp) of each.

    A sample is a row of the batch, or a group of rows that belong together, such as a chosen and a rejected answer.

    Args:
        data: The global batch.
        gbs: Samples of one optimizer step, over all ranks.
        mbs: Samples of one micro-batch on one rank.
        dp_size: Number of data-parallel ranks.

    Raises:
        ValueError: If the sizes do not divide.
    """
    if gbs < 1 or mbs < 1:
        raise ValueError(
            f"Training takes batches of at least 1 sample, found a global batch of {gbs}, micro-batches of {mbs}."
        )
    num_samples = data.size // data.group_size
    if num_samples == 0 or num_samples % gbs:
        raise ValueError(
            f"Training got {num_samples} samples, which is not a multiple of policy.train_global_batch_size {gbs}; "
            "change one of the two."
        )
    if gbs % (mbs * dp_size):
        raise ValueError(
            f"policy.train_global_batch_size {gbs} is not a multiple of policy.train_micro_batch_size {mbs} x the "
            f"data-parallel size {dp_size}; change one of them."
        )
    rows_per_rank, rows_per_step = gbs // dp_size * data.group_size, gbs * data.group_size
    return [
        BatchedData.concat(
            [
                data.slice(start, start + rows_per_rank)
                for start in range(rank * rows_per_rank, data.size, rows_per_step)
            ]
        )
        for rank in range(dp_size)
    ]


def shard_for_inference(data: BatchedData, *, mbs: int, dp_size: int) -> InferenceShards:
    """Deal out any number of rows contiguously, filled up with copies of the first rows so that all shards are equal.

    Args:
        data: The global batch.
        mbs: Largest number of samples of one micro-batch on one rank, each a row or a group of rows.
        dp_size: Number of data-parallel ranks.

    Raises:
        ValueError: If the batch is empty or `mbs` is below 1.
    """
    if data.size == 0:
        raise ValueError("A forward pass got a batch without samples; it needs at least 1.")
    if mbs < 1:
        raise ValueError(f"A micro-batch needs at least 1 sample, found {mbs}.")
    group_size = data.group_size
    groups_per_rank = -(-(data.size // group_size) // dp_size)
    num_microbatches = -(-groups_per_rank // mbs)
    mbs = -(-groups_per_rank // num_microbatches)
    rows_per_rank = groups_per_rank * group_size
    shards, num_rows = [], []
    for rank in range(dp_size):
        own = range(min(rank * rows_per_rank, data.size), min((rank + 1) * rows_per_rank, data.size))
        num_fill = num_microbatches * mbs * group_size - len(own)
        filler = [*range(group_size)] * (num_fill // group_size)
        shard = data.select([*own, *filler]) if num_fill else data.slice(own.start, own.stop)
        if num_fill and "sample_mask" in shard:
            shard["sample_mask"] = torch.cat([shard["sample_mask"][: len(own)], torch.zeros(num_fill)])
        shards.append(shard)
        num_rows.append(len(own))
    return InferenceShards(shards, num_rows, mbs)


def require_parallel_sizes_fit(megatron_cfg: MegatronConfig, world_size: int) -> None:
    """Check that the ranks can be divided into the recipe's model-parallel groups.

    Raises:
        ValueError: If they cannot.
    """
    for names in (REPLICA_SIZES, EXPERT_REPLICA_SIZES):
        sizes = [megatron_field(megatron_cfg, name) for name in names]
        if data_parallel_size(world_size, *sizes) is None:
            listed = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
            raise ValueError(
                f"The world size {world_size} (cluster.num_nodes x cluster.gpus_per_node) is not a multiple of "
                f"{math.prod(sizes)} ({listed} in policy.megatron_cfg); change one of them."
            )
