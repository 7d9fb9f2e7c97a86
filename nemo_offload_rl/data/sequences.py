"""Lists of token ids into padded training batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_offload_rl.data.batch import BatchedData


def response_batch(
    prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], pad_token_id: int
) -> BatchedData:
    """Prompts followed by the responses that are trained on.

    Returns:
        input_ids, input_lengths, token_mask (1 on the response) and sample_mask (1 where there is a response).
    """
    sequences = [[*prompt, *response] for prompt, response in zip(prompt_ids, response_ids, strict=True)]
    width = max(len(sequence) for sequence in sequences)
    input_ids = torch.full((len(sequences), width), pad_token_id, dtype=torch.long)
    token_mask = torch.zeros(len(sequences), width)
    for row, (sequence, prompt) in enumerate(zip(sequences, prompt_ids, strict=True)):
        input_ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
        token_mask[row, len(prompt) : len(sequence)] = 1
    return BatchedData(
        input_ids=input_ids,
        input_lengths=torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long),
        token_mask=token_mask,
        sample_mask=torch.tensor([float(len(response) > 0) for response in response_ids]),
    )


def response_logprobs(batch: BatchedData, logprobs: Sequence[Sequence[float]]) -> torch.Tensor:
    """The sampler's log-probs of the response tokens, float32 [B, S], 0 elsewhere.

    Args:
        batch: made by ``response_batch``.
        logprobs: one number a response token, for each row.
    """
    table = torch.zeros_like(batch["token_mask"])
    for row, (values, length) in enumerate(zip(logprobs, batch["input_lengths"].tolist(), strict=True)):
        table[row, length - len(values) : length] = torch.tensor(values, dtype=torch.float32)
    return table
