"""Finds the tokens that a sampler with top-k and top-p keeps, from logits that are split over the vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class SamplingFilter:
    """Says which tokens a sampler keeps; log-probs are then those of the distribution over them.

    Attributes:
        top_k: Number of tokens to keep; None keeps all. Tokens as likely as the last one of them are kept, too.
        top_p: Keeps the fewest most probable tokens, after top_k, that sum to at least this probability; 1 keeps all.
    """

    top_k: int | None = None
    top_p: float = 1.0

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is filtered."""
        return self.top_k is None and self.top_p == 1

    def thresholds(self, scaled: Tensor, group: ProcessGroup | None) -> Tensor:
        """Returns the smallest logit that is kept in each row.

        Args:
            scaled: float32 [rows, V_local] logits after the temperature, -inf at the vocabulary's padding: this rank's
                slice of the vocabulary.
            group: The ranks that have the other slices; None for the whole vocabulary.

        Returns:
            float32 [rows], equal on all ranks of the group.
        """
        # The top_k of all are among the top_k of each slice; without top_k, top_p looks at every token.
        values = scaled if self.top_k is None else scaled.topk(min(self.top_k, scaled.shape[1])).values
        if group is not None and group.size() > 1:
            slices = [torch.empty_like(values) for _ in range(group.size())]
            torch.distributed.all_gather(slices, values.contiguous(), group=group)
            values = torch.cat(slices, dim=1)
        values = values.sort(dim=1, descending=True).values[:, : self.top_k]
        if self.top_p == 1:
            return values[:, -1]
        probs = values.softmax(dim=1).double()
        mass_before = probs.cumsum(dim=1) - probs
        num_kept = (mass_before < self.top_p).sum(dim=1)  # at least 1: nothing comes before the first
        return values.gather(1, num_kept[:, None] - 1).squeeze(1)


KEEP_ALL = SamplingFilter()
