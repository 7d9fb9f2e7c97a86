"""Cuts a rank's batch into micro-batches: padded rows, or sequences packed into rows of a fixed number of tokens."""

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.mcore.context_parallel import positions_of_ranks
from nemo_offload_rl.memory.units import round_up


def modified_first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items by modified first-fit decreasing (Johnson and Garey 1985, "A 71/60 theorem for bin packing").

    Items above half of the capacity get a bin each. Each of these bins gets the largest item above a third that fits;
    then, from the last bin to the first, those without such an item get a pair of items above a sixth; then each gets
    whatever fits, the largest first. The remaining items are packed first-fit decreasing.

    Args:
        sizes: sizes of the items; one above the capacity gets a bin of its own.
        capacity: capacity of each bin.

    Returns:
        Indices of items, bin by bin.
    """
    # From the smallest to the largest; of equal sizes, later ones come first here and so are taken last.
    left = _Items((size, -index) for index, size in enumerate(sizes))
    bins: list[list[int]] = []
    room: list[int] = []

    def put(bin_number: int, size: int, index: int) -> None:
        bins[bin_number].append(index)
        room[bin_number] -= size

    for size, index in left.take_above(capacity / 2):
        bins.append([])
        room.append(capacity)
        put(len(bins) - 1, size, index)
    medium = _Items((size, -index) for size, index in left.take_above(capacity / 3))
    partnered = set()
    for number in range(len(bins)):
        if (found := medium.take_largest(room[number])) is not None:
            put(number, *found)
            partnered.add(number)
    small = _Items((size, -index) for size, index in left.take_above(capacity / 6))
    for number in reversed(range(len(bins))):
        if number not in partnered and small.two_smallest() <= room[number]:
            put(number, *small.take_smallest())
            second = small.take_largest(room[number])
            assert second is not None, "the smallest but one fits"
            put(number, *second)
    left = _Items((*left.items, *medium.items, *small.items))
    for number in range(len(bins)):
        while (found := left.take_largest(room[number])) is not None:
            put(number, *found)
    num_mixed = len(bins)
    for size, index in left.take_above(-1):
        number = next((n for n in range(num_mixed, len(bins)) if size <= room[n]), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(capacity)
        put(number, size, index)
    return bins


class _Items:
    """Holds the unpacked items as (size, -index), from the smallest to the largest; returns them as (size, index)."""

    def __init__(self, items: Iterable[tuple[int, int]]) -> None:
        self.items = sorted(items)

    def take_above(self, limit: float) -> list[tuple[int, int]]:
        """Takes the items larger than a limit, the largest first."""
        start = bisect_right(self.items, limit, key=lambda item: item[0])
        taken = self.items[start:]
        del self.items[start:]
        return [(size, -index) for size, index in reversed(taken)]

    def take_largest(self, room: int) -> tuple[int, int] | None:
        """Takes the largest item that fits into some room; None where none does."""
        end = bisect_right(self.items, room, key=lambda item: item[0])
        if end == 0:
            return None
        size, index = self.items.pop(end - 1)
        return size, -index

    def take_smallest(self) -> tuple[int, int]:
        """Takes the smallest item."""
        size, index = self.items.pop(0)
        return size, -index

    def two_smallest(self) -> float:
        """Returns the size of the two smallest together; infinite if there are fewer."""
        return self.items[0][0] + self.items[1][0] if len(self.items) > 1 else float("inf")


@dataclass(frozen=True)
class MicroBatch:
    """Holds the input of one forward pass.

    Attributes:
        data: the samples, each field as in the batch, sequences right padded to a common length S.
        tokens: int64 [n, S] padded, or [1, T] packed: the model's input.
        positions: int64, the shape of `tokens`.
        cu_seqlens: int32 [n + 1], where each packed sequence starts in `tokens`; None if padded.
        max_seqlen: the longest sequence in tokens.
        num_filler: how many rows at the end are copies that fill the micro-batch up; `sample_mask` leaves them out.
        positions_of_ranks: int64 [CP, S / CP] or [CP, T / CP], which columns of `tokens` each context-parallel rank
            computes; None without context parallelism.
    """

    data: BatchedData
    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int
    num_filler: int = 0
    positions_of_ranks: Tensor | None = None

    def padding(self) -> Tensor:
        """Returns where `tokens` has no token of a sample: bool, the shape of `tokens`, on its device."""
        lengths = self.data["input_lengths"]
        if self.cu_seqlens is None:
            padding = self.positions >= lengths[:, None]
            padding[lengths.shape[0] - self.num_filler :] = True
            return padding
        columns = torch.arange(self.tokens.shape[1], dtype=self.cu_seqlens.dtype, device=self.tokens.device)
        sequences = torch.searchsorted(self.cu_seqlens[1:], columns, right=True)
        return self.positions >= lengths[sequences]


def padded_length(longest: int, divisible_by: int, limit: int) -> int:
    """Returns the length S that a batch is padded to: the longest sequence, rounded up.

    Raises:
        ValueError: if a sequence is longer than `limit` (policy.max_total_sequence_length).
    """
    if longest > limit:
        raise ValueError(
            f"A sequence has {longest} tokens, more than policy.max_total_sequence_length {limit}; raise it or drop "
            "the sample."
        )
    return round_up(longest, divisible_by)


def with_length(data: BatchedData, length: int) -> BatchedData:
    """Returns the batch with every [B, S] field padded with zeros on the right, or a view of it cut, to [B, length]."""
    width = data["input_ids"].shape[1]
    out = BatchedData()
    out.group_size = data.group_size
    for name, column in data.items():
        if isinstance(column, Tensor) and column.dim() == 2 and column.shape[1] == width:
            # pad copies also where it adds nothing: 30 of 36 ms for 512 rows of 512, while the GPU waits for its input.
            column = column[:, :length] if length <= width else torch.nn.functional.pad(column, (0, length - width))
        out[name] = column
    return out


def padded_microbatches(
    data: BatchedData, size: int, lengths: Sequence[int] | None = None, *, context_parallel_size: int = 1
) -> list[MicroBatch]:
    """Cut rows into micro-batches of `size`; the last is filled up with copies that `sample_mask` leaves out.

    Args:
        data: the rows.
        size: rows of a micro-batch.
        lengths: the tokens that each micro-batch's rows are cut to, at most those of `data`; None leaves them all.
        context_parallel_size: number of ranks that each row is split over.

    Raises:
        ValueError: `size` would split groups of rows that belong together.
    """
    out = []
    chunks = list(data.chunks(size))
    for chunk, width in zip(chunks, lengths or [data["input_ids"].shape[1]] * len(chunks), strict=True):
        chunk = with_length(chunk, width)
        positions = torch.arange(width, device=data["input_ids"].device).expand(size, width)
        missing = size - chunk.size
        if missing:
            filler = chunk.select([*range(data.group_size)] * (missing // data.group_size))
            chunk = BatchedData.concat([chunk, _left_out(filler)])
        split = _split(torch.tensor([0, width], device=positions.device), context_parallel_size)
        out.append(MicroBatch(chunk, chunk["input_ids"], positions, None, width, missing, split))
    return out


def _left_out(data: BatchedData) -> BatchedData:
    """Returns the rows with a `sample_mask` of 0, if they have that column."""
    masked = data.slice(0, data.size)
    if "sample_mask" in data:
        masked["sample_mask"] = torch.zeros_like(data["sample_mask"])
    return masked


def with_filler(batches: Sequence[MicroBatch], number: int) -> list[MicroBatch]:
    """Returns the micro-batches, filled up to `number` with copies of the shortest that `sample_mask` leaves out.

    Only forward-only passes may be filled up: in training, experts would count the filler's tokens.
    """
    if number == len(batches):
        return list(batches)
    shortest = min(batches, key=lambda batch: batch.tokens.numel())
    filler = dataclasses.replace(shortest, data=_left_out(shortest.data))
    return [*batches, *[filler] * (number - len(batches))]


def pack_bins(lengths: Sequence[int], capacity: int, *, min_bins: int = 1, group_size: int = 1) -> list[list[int]]:
    """Choose which samples share a packed row, by `packing.modified_first_fit_decreasing`.

    Args:
        lengths: tokens of each sample.
        capacity: tokens a bin may hold; a longer sample, or group of samples, gets a bin of its own.
        min_bins: bins are split until there are this many, since data-parallel ranks run equally many micro-batches.
        group_size: consecutive samples that share a bin, since they belong together.

    Returns:
        Indices of samples, bin by bin; each bin keeps the order of the batch.

    Raises:
        ValueError: if there are fewer samples, or groups of samples, than `min_bins`.
    """
    tokens = [sum(lengths[first : first + group_size]) for first in range(0, len(lengths), group_size)]
    if min_bins > len(tokens):
        items = "samples" if group_size == 1 else f"groups of {group_size} samples"
        raise ValueError(
            f"{len(tokens)} {items} cannot fill {min_bins} packed micro-batches; lower the number of ranks."
        )
    bins = modified_first_fit_decreasing(tokens, capacity)
    while len(bins) < min_bins:
        fullest = max(range(len(bins)), key=lambda b: len(bins[b]))
        groups = bins[fullest]
        bins[fullest] = groups[: len(groups) // 2]
        bins.append(groups[len(groups) // 2 :])
    return [[g * group_size + row for g in sorted(groups) for row in range(group_size)] for groups in bins]


def packed_microbatches(
    data: BatchedData,
    bins: Sequence[Sequence[int]],
    *,
    divisible_by: int,
    row_divisible_by: int,
    context_parallel_size: int = 1,
) -> list[MicroBatch]:
    """Makes one packed row of each bin.

    Args:
        data: the samples.
        bins: from `pack_bins`.
        divisible_by: each sequence is padded to a multiple of this many tokens.
        row_divisible_by: the last sequence is padded until the row is a multiple of this many tokens.
        context_parallel_size: number of ranks that each row is split over.
    """
    out = []
    for items in bins:
        chunk = data.select(list(items))
        lengths = [round_up(n, divisible_by) for n in chunk["input_lengths"].tolist()]
        lengths[-1] += round_up(sum(lengths), row_divisible_by) - sum(lengths)
        width = max([*lengths, chunk["input_ids"].shape[1]])
        chunk = with_length(chunk, width)
        columns = torch.arange(width).expand(len(lengths), width)
        packed = columns < torch.tensor(lengths)[:, None]
        tokens, positions = chunk["input_ids"][packed][None], columns[packed][None]
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        split = _split(starts, context_parallel_size)
        out.append(MicroBatch(chunk, tokens, positions, starts, max(lengths), positions_of_ranks=split))
    return out


def _split(cu_seqlens: Tensor, context_parallel_size: int) -> Tensor | None:
    return None if context_parallel_size == 1 else positions_of_ranks(cu_seqlens, context_parallel_size)


def unpack(values: Tensor, cu_seqlens: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Return per-token values of packed sequences in padded rows.

    Args:
        values: float [T], entry i belongs to packed token i.
        cu_seqlens: int32 [n + 1].
        lengths: int64 [n], real tokens of each sequence (without its padding).
        width: S.

    Returns:
        float [n, S], 0 beyond each sequence; gradients flow back to `values`.
    """
    columns = torch.arange(width, device=values.device)[None]
    real = columns < lengths[:, None]
    index = torch.where(real, cu_seqlens[:-1, None].long() + columns, 0)
    return torch.where(real, values[index], 0.0)
