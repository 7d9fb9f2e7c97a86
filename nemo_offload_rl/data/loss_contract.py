"""Defines the interface of losses; kept apart from the losses, so that workers need not import `algorithms`."""

from __future__ import annotations

from typing import Protocol

import torch

from nemo_offload_rl.data.batch import BatchedData, GlobalCounts


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
