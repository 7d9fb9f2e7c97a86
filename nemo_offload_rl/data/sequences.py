"""Makes padded training batches from lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_offload_rl.data.batch import BatchedData


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
