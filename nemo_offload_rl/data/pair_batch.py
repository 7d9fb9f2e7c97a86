"""Turns preference pairs into batches, and checks before a run that this works for all pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_offload_rl.data.batch import BatchedData, response_batch
from nemo_offload_rl.data.preferences import ROWS_OF_A_PAIR, PreferencePair
from nemo_offload_rl.data.prompts import PromptFormat

_TOKENS_OF_MASKED_PART = 4  # tokens kept of the prompt, and of the answer, of a pair that is too long; as in NeMo-RL


def pair_batch(answer_format: PromptFormat, pairs: Sequence[PreferencePair]) -> BatchedData:
    """Makes a training batch from pairs: row 2i has the chosen answer of pair i, row 2i + 1 the rejected one.

    A pair is left out of the loss whole if either answer has no token (an empty answer with ``add_eos: false``), or
    exceeds the format's limit; in that case both rows are cut to a few tokens.

    Args:
        answer_format: turns a prompt and its answer into tokens.
        pairs: one or more.

    Returns:
        The columns of ``response_batch``, in groups of two rows. token_mask is 1 on the last turn only; sample_mask is
        0 for both rows of a pair that is left out.

    Raises:
        DataError: the chat template cannot render a conversation.
    """
    rows = answer_format.examples([answer for pair in pairs for answer in pair.answers], may_reach_limit=True)
    fits = [
        both_fit
        for chosen, rejected in zip(rows[::2], rows[1::2], strict=True)
        for both_fit in [chosen.fits and rejected.fits] * ROWS_OF_A_PAIR
    ]
    few = min(_TOKENS_OF_MASKED_PART, answer_format.max_tokens // 2)
    batch = response_batch(
        [row.prompt_ids if fit else row.prompt_ids[: max(few, 1)] for row, fit in zip(rows, fits, strict=True)],
        [row.answer_ids if fit else row.answer_ids[:few] for row, fit in zip(rows, fits, strict=True)],
        answer_format.pad_token_id,
    )
    batch["sample_mask"] *= torch.tensor(fits, dtype=torch.float32)
    pair_mask = batch["sample_mask"].view(-1, ROWS_OF_A_PAIR).amin(dim=1)
    batch["sample_mask"] = pair_mask.repeat_interleave(ROWS_OF_A_PAIR)
    return batch.in_groups(ROWS_OF_A_PAIR)


def num_left_out(batch: BatchedData) -> int:
    """Counts the pairs of a batch that are left out of the loss, since an answer is too long or has no token."""
    return int((batch["sample_mask"][::ROWS_OF_A_PAIR] == 0).sum())


def check_pairs(answer_format: PromptFormat, pairs: Sequence[PreferencePair]) -> int:
    """Checks that ``pair_batch`` will work, so that a run does not fail halfway; see ``PromptFormat.check_rows``.

    Args:
        answer_format: the format that ``pair_batch`` will be called with.
        pairs: all pairs that the run may use.

    Returns:
        The number of pairs that were checked.

    Raises:
        DataError: a row cannot be read, a word has no token, or the chat template cannot render a conversation; names
            the first such case.
    """
    answers = (answer for pair in pairs for answer in pair.answers)
    return answer_format.check_rows(answers, with_answers=True) // ROWS_OF_A_PAIR
