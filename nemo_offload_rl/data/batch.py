"""Defines a batch of samples, the counts by which losses divide sums over a batch, and the interface of losses.

A batch maps names to columns with one row per sample. Training uses these columns:

- ``input_ids`` int64 [B, S], right padded, and ``input_lengths`` int64 [B];
- ``token_mask`` float32 [B, S]: 1 where the token at that position is trained on;
- ``sample_mask`` float32 [B]: 0 leaves a sample out of the loss;
- log-probs, float32 [B, S]: entry t is log p(input_ids[t] | input_ids[<t]), with 0 at t = 0 and at padding. They are
  ``prev_logprobs`` (the policy before the update), ``generation_logprobs`` (the sampler's) and
  ``reference_policy_logprobs``;
- ``advantages`` float32 [B, S].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch.nn.functional import pad

LOGPROB_COLUMNS = ("input_ids", "input_lengths")
"""The columns that log-prob passes read."""
LOSS_COLUMNS = (*LOGPROB_COLUMNS, "token_mask", "sample_mask")
"""The columns that training and evaluation read, besides those of the loss."""


class BatchedData(dict[str, Any]):
    """Maps names to columns of equal length: tensors with leading dimension B, or lists of length B.

    Attributes:
        group_size: number of consecutive rows that belong together, such as a chosen and a rejected answer, and that no
            method separates; 1 if rows are independent.
    """

    group_size: int = 1

    def in_groups(self, group_size: int) -> Self:
        """Returns the same columns as a batch in which every ``group_size`` consecutive rows form a group.

        Raises:
            ValueError: the rows are not a whole number of groups.
        """
        if group_size < 1 or self.size % group_size:
            raise ValueError(f"A batch of {self.size} rows is no whole number of groups of {group_size} rows.")
        return self._with(dict(self), group_size)

    def require_columns(self, names: Sequence[str], reader: str) -> None:
        """Checks that the batch has columns, of which `input_lengths` fits the rows.

        Raises:
            ValueError: a column is missing, or a row has fewer than `input_lengths` tokens.
        """
        missing = [name for name in names if name not in self]
        if missing:
            raise ValueError(f"{reader} needs the column {missing[0]}, found {', '.join(self) or 'none'}; add it.")
        longest, width = max(self["input_lengths"].tolist(), default=0), self["input_ids"].shape[1]
        if longest > width:
            raise ValueError(f"input_lengths has {longest}, but rows of input_ids have {width} tokens; correct it.")

    def _with(self, columns: Mapping[str, Any], group_size: int | None = None) -> Self:
        batch = type(self)(columns)
        batch.group_size = self.group_size if group_size is None else group_size
        return batch

    def _require_whole_groups(self, rows: Sequence[int]) -> None:
        size = self.group_size
        whole = [first - first % size + number for first in rows[::size] for number in range(size)]
        if list(rows) != whole:
            raise ValueError(f"Rows {list(rows)} of a batch are no whole groups of {size} rows that belong together.")

    @property
    def size(self) -> int:
        """Number of samples B; 0 where there is no column."""
        sizes = {name: len(column) for name, column in self.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"The columns of a batch must have one length, found {sizes}.")
        return next(iter(sizes.values()), 0)

    def slice(self, start: int, stop: int) -> Self:
        """Returns rows ``start`` up to ``stop``; tensors are views.

        Raises:
            ValueError: the rows are not whole groups.
        """
        if self.group_size > 1:
            self._require_whole_groups(range(self.size)[start:stop])
        return self._with({name: column[start:stop] for name, column in self.items()})

    def select(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Returns the rows at ``indices``, in that order; rows may repeat.

        Raises:
            ValueError: the rows are not whole groups.
        """
        rows = [int(index) for index in indices]
        self._require_whole_groups(rows)
        return self._with(
            {
                name: column[torch.tensor(rows, dtype=torch.long, device=column.device)]
                if isinstance(column, torch.Tensor)
                else [column[row] for row in rows]
                for name, column in self.items()
            }
        )

    @classmethod
    def concat(cls, batches: Sequence[BatchedData], pad_values: Mapping[str, float] | None = None) -> Self:
        """Stacks the rows of several batches.

        Args:
            batches: batches with the same columns.
            pad_values: padding value on the right of [B, S] columns with different S, by name; 0 for other columns.

        Raises:
            ValueError: the batches have different columns or group sizes.
        """
        if not batches:
            return cls()
        names = list(batches[0])
        for batch in batches[1:]:
            if set(batch) != set(names):
                raise ValueError(f"Batches to join must have the same columns, found {names} and {list(batch)}.")
        sizes = {batch.group_size for batch in batches}
        if len(sizes) > 1:
            raise ValueError(f"Batches to join must have groups of the same size, found {sorted(sizes)}.")
        fill = pad_values or {}
        joined = cls({name: _join([batch[name] for batch in batches], fill.get(name, 0)) for name in names})
        joined.group_size = batches[0].group_size
        return joined

    def chunks(self, size: int) -> Iterator[Self]:
        """Yields consecutive batches of ``size`` rows; the last may be shorter.

        Raises:
            ValueError: ``size`` is below 1, or not a multiple of the group size.
        """
        if size < 1:
            raise ValueError(f"A batch is cut into pieces of at least 1 row, found {size}.")
        for start in range(0, self.size, size):
            yield self.slice(start, start + size)

    def to(self, device: torch.device | str) -> Self:
        """Returns the same batch with its tensors on ``device``; lists are shared."""
        return self._with(
            {
                name: column.to(device, non_blocking=True) if isinstance(column, torch.Tensor) else column
                for name, column in self.items()
            }
        )


def _join(columns: Sequence[Any], fill: float) -> Any:
    if not isinstance(columns[0], torch.Tensor):
        return [row for column in columns for row in column]
    if columns[0].dim() == 2:
        width = max(column.shape[1] for column in columns)
        columns = [pad(column, (0, width - column.shape[1]), value=fill) for column in columns]
    return torch.cat(list(columns))


@dataclass(frozen=True)
class GlobalCounts:
    """Holds the counts by which a loss divides, over the global batch: all micro-batches of all data-parallel ranks.

    Attributes:
        valid_seqs: 0-dim float32, the sum of ``sample_mask``.
        valid_toks: 0-dim float32, the sum of ``token_mask[:, 1:] * sample_mask[:, None]``.
    """

    valid_seqs: torch.Tensor
    valid_toks: torch.Tensor

    @classmethod
    def of(cls, data: BatchedData) -> Self:
        """Computes the counts of one batch; a data-parallel caller sums them over its ranks."""
        sample_mask = data["sample_mask"].float()
        return cls(
            valid_seqs=sample_mask.sum(),
            valid_toks=(data["token_mask"][:, 1:].float() * sample_mask[:, None]).sum(),
        )


def response_batch(
    prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], pad_token_id: int
) -> BatchedData:
    """Makes a batch of prompts, each followed by the response that is trained on.

    Returns:
        input_ids, input_lengths, token_mask (1 on the response) and sample_mask (1 where there is a response).
    """
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompt_ids], dtype=torch.long)
    response_lengths = torch.tensor([len(response) for response in response_ids], dtype=torch.long)
    lengths = prompt_lengths + response_lengths
    positions = torch.arange(int(lengths.max()))
    is_token = positions < lengths[:, None]
    input_ids = torch.full(is_token.shape, pad_token_id, dtype=torch.long)
    # Masked assignment fills row by row, so that one conversion from Python numbers serves all rows.
    input_ids[is_token] = torch.tensor(
        [token for row in zip(prompt_ids, response_ids, strict=True) for part in row for token in part],
        dtype=torch.long,
    )
    return BatchedData(
        input_ids=input_ids,
        input_lengths=lengths,
        token_mask=(is_token & (positions >= prompt_lengths[:, None])).float(),
        sample_mask=(response_lengths > 0).float(),
    )


def response_logprobs(batch: BatchedData, logprobs: Sequence[Sequence[float]]) -> torch.Tensor:
    """Returns the sampler's log-probs of the response tokens, float32 [B, S], 0 elsewhere.

    Args:
        batch: made by ``response_batch``.
        logprobs: for each row, one number per response token.
    """
    is_response = batch["token_mask"] > 0
    assert is_response.sum(dim=1).tolist() == [len(row) for row in logprobs], "a log-prob for each response token"
    table = torch.zeros_like(batch["token_mask"])
    table[is_response] = torch.tensor([value for row in logprobs for value in row], dtype=torch.float32)
    return table


class LossFunction(Protocol):
    """Defines a picklable loss over next-token log-probs; it never sees logits."""

    def __call__(
        self, logprobs: torch.Tensor, data: BatchedData, counts: GlobalCounts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the contribution of one micro-batch to the mean over the global batch.

        Args:
            logprobs: float32 [B, S] with grad; entry t is log p(input_ids[t] | input_ids[<t]), entry 0 is 0.
            data: the micro-batch that the log-probs belong to.
            counts: valid sequences and tokens of the global batch.

        Returns:
            A 0-dim loss, and metrics by name as detached 0-dim tensors. Both are sums divided by the global counts, so
            that they add up over micro-batches and ranks.
        """
