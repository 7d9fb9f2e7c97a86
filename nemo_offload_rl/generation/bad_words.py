"""Keeps words that the recipe bans out of answers, token by token, by vLLM's rules."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Returns the token sequences that answers must not contain: those that vLLM makes of its `bad_words`.

    A word counts as at the start of a text, and as behind a space if this gives as many tokens and another first one.

    Args:
        tokenizer: Encodes the words without special tokens at their ends.
        words: The banned words, each of at least one token.
    """
    sequences = []
    for word in dict.fromkeys(words):
        bare, spaced = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False).ids for space in ("", " "))
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return sequences


def without_bad_words(logits: torch.Tensor, answers: torch.Tensor, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns logits with minus infinity for each token that would complete a banned sequence.

    Args:
        logits: [rows, vocabulary], of the next token.
        answers: int64 [rows, tokens so far], without the prompts, whose tokens do not count.
        sequences: Of `bad_word_ids`.
    """
    logits = logits.clone()
    num_tokens = answers.shape[1]
    for *prefix, last in sequences:
        if len(prefix) <= num_tokens:
            expected = torch.tensor(prefix, dtype=torch.int64, device=answers.device)
            completes = (answers[:, num_tokens - len(prefix) :] == expected).all(dim=1)
            logits[:, last].masked_fill_(completes, float("-inf"))
    return logits
