"""Cuts a rank's rows into micro-batches, with the same number and padding on all data-parallel ranks."""

from collections.abc import Sequence
from typing import Literal

import torch

from nemo_offload_rl.config.megatron import megatron_field, num_interleaved
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig, SequencePackingConfig, row_multiple, sequence_multiple
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
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.plan.activations import LOGPROB_TOKENS, TRAIN_TOKENS


class MicroBatcher:
    """Cuts a rank's batch into micro-batches, padded or packed as the recipe says.

    Args:
        config: the recipe's policy section.
        device: the device that padded micro-batches are copied to.

    Raises:
        ValueError: the tokens of a packed row are still `auto`.
    """

    def __init__(self, config: PolicyConfig, device: torch.device) -> None:
        self._context = config["megatron_cfg"]["context_parallel_size"]
        self._divisible_by = sequence_multiple(config)
        self._limit = config["max_total_sequence_length"]
        self._packing = config["sequence_packing"] if config["sequence_packing"]["enabled"] else None
        self._largest_first = config["sequence_packing"].get("microbatch_order") == "largest_first"
        self._row_multiple = 1 if self._packing is None else row_multiple(config)
        self._row_tokens = {} if self._packing is None else _row_tokens(self._packing)
        self._device = device
        self._interleaved = _interleaved(config["megatron_cfg"])
        self._has_stages = config["megatron_cfg"]["pipeline_model_parallel_size"] > 1

    def cut(
        self,
        data: BatchedData,
        mbs: int,
        tokens_key: Literal["train_mb_tokens", "logprob_mb_tokens"],
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
        if self._packing is None:
            size = mbs * data.group_size
            lengths = self._padded_lengths(data["input_lengths"].split(size))
            if fixed_shapes:
                lengths = [round_up(self._limit, self._divisible_by)] * len(lengths)
            elif self._has_stages:
                lengths = [max(lengths)] * len(lengths)
            on_device = with_length(data, max(lengths)).to(self._device)  # one copy of each field, not of each cut
            padded = padded_microbatches(on_device, size, lengths, context_parallel_size=self._context)
            number = self._num_scheduled(len(padded), most=len(padded), forward_only=forward_only)
            return with_filler(padded, number), None
        (longest,) = self._common([int(data["input_lengths"].max())])
        length = padded_length(longest, self._divisible_by, self._limit)
        data = with_length(data, length)
        row_tokens = self._row_tokens[tokens_key]
        if data.group_size == 1:
            # Eager rows may be longer by their padding; those of captured graphs have one shape.
            _require_room(length if fixed_shapes else longest, tokens_key, row_tokens)
        lengths = [padded_length(n, self._divisible_by, length) for n in data["input_lengths"].tolist()]
        bins = pack_bins(lengths, row_tokens, group_size=data.group_size)
        num_samples = data.size // data.group_size
        (most_bins,) = self._common([len(bins)])
        number = self._num_scheduled(most_bins, most=num_samples, forward_only=forward_only)
        if (num_bins := min(number, num_samples)) > len(bins):
            bins = pack_bins(lengths, row_tokens, min_bins=num_bins, group_size=data.group_size)
        if self._largest_first:
            bins.sort(key=lambda items: sum(lengths[item] for item in items), reverse=True)
        batches = packed_microbatches(
            data,
            bins,
            divisible_by=self._divisible_by,
            row_divisible_by=row_tokens if fixed_shapes else self._row_multiple,
            context_parallel_size=self._context,
        )
        return with_filler(batches, number), bins

    def _num_scheduled(self, least: int, *, most: int, forward_only: bool) -> int:
        """Returns the number of micro-batches to run: `least`, or more where virtual stages need more.

        Raises:
            ValueError: training needs more than `most`.
        """
        number = least if self._interleaved is None else num_interleaved(least, *self._interleaved)
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
        return [padded_length(tokens, self._divisible_by, self._limit) for tokens in longest]

    def _common(self, values: list[int]) -> list[int]:
        """Returns the largest of the data-parallel ranks' values, one by one."""
        if distributed.mpu.get_data_parallel_world_size() == 1:
            return values  # reading an all-reduce's result would wait for all queued GPU work
        held = torch.tensor(values, device=self._device)
        torch.distributed.all_reduce(
            held, torch.distributed.ReduceOp.MAX, group=distributed.mpu.get_data_parallel_group()
        )
        return held.tolist()


def _interleaved(cfg: MegatronConfig) -> tuple[int, int] | None:
    """Returns the pipeline-parallel size and the micro-batches of a group; None without virtual stages."""
    if cfg["virtual_pipeline_model_parallel_size"] is None:
        return None
    num_stages = cfg["pipeline_model_parallel_size"]
    return num_stages, megatron_field(cfg, "microbatch_group_size_per_vp_stage") or num_stages


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


def _row_tokens(packing: SequencePackingConfig) -> dict[str, int]:
    stated = {key: packing[key] for key in (TRAIN_TOKENS, LOGPROB_TOKENS) if key in packing}
    for key, tokens in stated.items():
        if tokens == "auto":
            raise ValueError(
                f"policy.sequence_packing.{key} is auto, which a run replaces by a number before it starts its "
                "workers; give a worker that you build yourself a number of tokens."
            )
    return {key: tokens for key, tokens in stated.items() if tokens != "auto"}
