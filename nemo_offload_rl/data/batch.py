"""A batch of samples, and the counts that turn sums over it into means.

A batch is a mapping of names to columns with one row a sample. The names that training uses:

- ``input_ids`` int64 [B, S], right padded, and ``input_lengths`` int64 [B];
- ``token_mask`` float32 [B, S]: 1 where the token at that position is trained on;
- ``sample_mask`` float32 [B]: 0 drops a sample from the loss;
- log-probs, float32 [B, S]: entry t is log p(input_ids[t] | input_ids[<t]), with 0 at t = 0 and at padding. They are
  ``prev_logprobs`` (the policy before the update), ``generation_logprobs`` (the sampler's) and
  ``reference_policy_logprobs``;
- ``advantages`` float32 [B, S].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn.functional import pad


class BatchedData(dict[str, Any]):
    """Columns of equal length: tensors with leading dimension B, or lists of length B."""

    @property
    def size(self) -> int:
        """Number of samples B; 0 where there is no column."""
        sizes = {name: len(column) for name, column in self.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"The columns of a batch must have one length, found {sizes}.")
        return next(iter(sizes.values()), 0)

    def slice(self, start: int, stop: int) -> Self:
        """Rows ``start`` up to ``stop``; tensors are views."""
        return type(self)({name: column[start:stop] for name, column in self.items()})

    def select(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The rows at ``indices``, in that order; rows may repeat."""
        rows = [int(index) for index in indices]
        return type(self)(
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
            pad_values: what [B, S] columns of unequal S are filled with on the right, by name; 0 for the others.

        Raises:
            ValueError: the batches have different columns.
        """
        if not batches:
            return cls()
        names = list(batches[0])
        for batch in batches[1:]:
            if set(batch) != set(names):
                raise ValueError(f"Batches to join must have the same columns, found {names} and {list(batch)}.")
        fill = pad_values or {}
        return cls({name: _join([batch[name] for batch in batches], fill.get(name, 0)) for name in names})

    def chunks(self, size: int) -> Iterator[Self]:
        """Consecutive pieces of ``size`` rows; the last may be shorter.

        Raises:
            ValueError: ``size`` is below 1.
        """
        if size < 1:
            raise ValueError(f"A batch is cut into pieces of at least 1 row, found {size}.")
        for start in range(0, self.size, size):
            yield self.slice(start, start + size)

    def to(self, device: torch.device | str) -> Self:
        """The same batch with its tensors on ``device``; lists are shared."""
        return type(self)(
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
    """What a loss divides by: counts over the global batch, so over every micro-batch of every data-parallel rank.

    Attributes:
        valid_seqs: 0-dim float32, the sum of ``sample_mask``.
        valid_toks: 0-dim float32, the sum of ``token_mask[:, 1:] * sample_mask[:, None]``.
    """

    valid_seqs: torch.Tensor
    valid_toks: torch.Tensor

    @classmethod
    def of(cls, data: BatchedData) -> Self:
        """Counts of one batch; a data-parallel caller sums them over its ranks."""
        sample_mask = data["sample_mask"].float()
        return cls(
            valid_seqs=sample_mask.sum(),
            valid_toks=(data["token_mask"][:, 1:].float() * sample_mask[:, None]).sum(),
        )
