"""Cuts a rank's rows into micro-batches, with the same number and padding on all data-parallel ranks."""

from collections.abc import Sequence

import torch

from nemo_offload_rl.config.megatron import num_interleaved
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.mcore import distributed
from nemo_offload_rl.mcore.batches import (
    MicroBatch,
    pack_bins,
    packed_microbatches,
    padded_length,
    padded_microbatches,
    with_filler,
    with_length,
)
from nemo_offload_rl.mcore.distributed import ParallelSizes
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.plan.activations import RowSizes, RowTokensKey


class MicroBatcher:
    """Cuts a rank's batch into micro-batches, padded or packed as the recipe says.

    Args:
        rows: how long rows may be.
        sizes: the model's parallel sizes.
        stage_group_size: micro-batches that virtual pipeline stages run as a group; not read without such stages.
        device: the device that padded micro-batches are copied to.
    """

    def __init__(self, rows: RowSizes, sizes: ParallelSizes, stage_group_size: int, device: torch.device) -> None:
        self._rows = rows
        self._sizes = sizes
        self._stage_group_size = stage_group_size
        self._device = device

    def cut(
        self,
        data: BatchedData,
        mbs: int,
        tokens_key: RowTokensKey,
        *,
        forward_only: bool = False,
        fixed_shapes: bool = False,
    ) -> tuple[list[MicroBatch], list[list[int]] | None]:
        """Return the micro-batches of this rank's rows and, if packed, the row indices in each; collective.

        Padded rows are as long as the longest of their micro-batch on all data-parallel ranks, which experts are
        spread over. Pipeline stages exchange tensors of one shape, so with them as long as the longest of all.

        Virtual pipeline stages take only certain numbers of micro-batches. Packed rows are split to reach one; a
        forward-only pass may end in micro-batches of filler rows, for which there are no indices.

        Args:
            data: the rows.
            mbs: samples of a padded micro-batch, each a row or a group of rows.
            tokens_key: the key of policy.sequence_packing with the tokens of a packed micro-batch.
            forward_only: whether the pass trains nothing.
            fixed_shapes: pad rows to the recipe's longest sequence, packed rows to all of their tokens.

        Raises:
            ValueError: virtual stages cannot train on so few samples, or a sequence is too long, for a packed row, too.
        """
        if self._rows.packed_multiple is None:
            size = mbs * data.group_size
            lengths = self._padded_lengths(data["input_lengths"].split(size))
            if fixed_shapes:
                lengths = [round_up(self._rows.longest, self._rows.multiple)] * len(lengths)
            elif self._sizes.pipeline > 1:
                lengths = [max(lengths)] * len(lengths)
            on_device = with_length(data, max(lengths)).to(self._device)  # one copy of each field, not of each cut
            padded = padded_microbatches(on_device, size, lengths, context_parallel_size=self._sizes.context)
            number = self._num_scheduled(len(padded), most=len(padded), forward_only=forward_only)
            return with_filler(padded, number), None
        (longest,) = self._common([int(data["input_lengths"].max())])
        length = padded_length(longest, self._rows.multiple, self._rows.longest)
        data = with_length(data, length)
        row_tokens = self._rows.packed_tokens[tokens_key]
        if data.group_size == 1:
            # Eager rows may be longer by their padding; those of captured graphs have one shape.
            _require_room(length if fixed_shapes else longest, tokens_key, row_tokens)
        lengths = [padded_length(n, self._rows.multiple, length) for n in data["input_lengths"].tolist()]
        bins = pack_bins(lengths, row_tokens, group_size=data.group_size)
        num_samples = data.size // data.group_size
        (most_bins,) = self._common([len(bins)])
        number = self._num_scheduled(most_bins, most=num_samples, forward_only=forward_only)
        if (num_bins := min(number, num_samples)) > len(bins):
            bins = pack_bins(lengths, row_tokens, min_bins=num_bins, group_size=data.group_size)
        if self._rows.largest_first:
            bins.sort(key=lambda items: sum(lengths[item] for item in items), reverse=True)
        batches = packed_microbatches(
            data,
            bins,
            divisible_by=self._rows.multiple,
            row_divisible_by=row_tokens if fixed_shapes else self._rows.packed_multiple,
            context_parallel_size=self._sizes.context,
        )
        return with_filler(batches, number), bins

    def _num_scheduled(self, least: int, *, most: int, forward_only: bool) -> int:
        """Returns the number of micro-batches to run: `least`, or more where virtual stages need more.

        Raises:
            ValueError: training needs more than `most`.
        """
        number = least
        if self._sizes.virtual_pipeline is not None:
            number = num_interleaved(least, self._sizes.pipeline, self._stage_group_size)
        if number > most and not forward_only:
            raise ValueError(
                f"A training step has at most {most} micro-batches on each rank, but "
                f"policy.megatron_cfg.virtual_pipeline_model_parallel_size needs {number}; choose a "
                "policy.train_global_batch_size that makes as many, or use no virtual stages."
            )
        return number

    def _padded_lengths(self, parts: Sequence[torch.Tensor]) -> list[int]:
        """Returns the length that each part's rows are padded to, from the tokens of its rows; equal on all ranks."""
        longest = self._common([int(lengths.max()) for lengths in parts])
        return [padded_length(tokens, self._rows.multiple, self._rows.longest) for tokens in longest]

    def _common(self, values: list[int]) -> list[int]:
        """Returns the largest of the data-parallel ranks' values, one by one."""
        if distributed.mpu.get_data_parallel_world_size() == 1:
            return values  # reading an all-reduce's result would wait for all queued GPU work
        held = torch.tensor(values, device=self._device)
        torch.distributed.all_reduce(
            held, torch.distributed.ReduceOp.MAX, group=distributed.mpu.get_data_parallel_group()
        )
        return held.tolist()


def _require_room(num_tokens: int, tokens_key: str, row_tokens: int) -> None:
    """Checks that the longest sample of all ranks fits into a packed row, as NeMo-RL's packer does.

    Raises:
        ValueError: it does not.
    """
    if num_tokens > row_tokens:
        raise ValueError(
            f"A sample has {num_tokens} tokens, more than a packed row (policy.sequence_packing.{tokens_key} "
            f"{row_tokens}); raise it, or lower policy.max_total_sequence_length."
        )
