"""Tests banned words against a search of whole answers."""

import itertools

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from nemo_offload_rl.generation.bad_words import bad_word_ids, without_bad_words


def test_a_word_is_also_banned_behind_a_space_if_it_then_has_another_first_token():
    ids = {word: index for index, word in enumerate(["?", "a", "b", " a", " ", "c", "d"])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" ?a|."), behavior="isolated")
    # " a" is one token, so " ab" has as many as "ab"; " c" has one more than "c".
    assert bad_word_ids(tokenizer, ["a", "ab", "c", "a", " dc"]) == [[1], [3], [1, 2], [3, 2], [5], [6, 5]]


def test_the_token_that_would_complete_a_word_is_impossible_and_no_other():
    sequences = [[4], [1, 2], [2, 2, 3]]
    answers = torch.tensor(list(itertools.product(range(4), repeat=3)))
    for length in range(4):
        rows = answers[:, :length]
        logits = torch.randn(len(rows), 5)
        got = without_bad_words(logits, rows, sequences)
        for row, tokens in enumerate(rows.tolist()):
            for token in range(5):
                whole = [*tokens, token]
                banned = any(whole[-len(word) :] == word for word in sequences)
                assert got[row, token] == (-torch.inf if banned else logits[row, token])
