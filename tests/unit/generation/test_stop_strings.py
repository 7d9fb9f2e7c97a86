"""Tests stop strings in text that grows token by token, against the text of all tokens."""

import dataclasses
import itertools
import random

import pytest
import torch
from support import engine_conformance
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nemo_offload_rl.generation.bad_words import bad_word_ids, without_bad_words
from nemo_offload_rl.generation.hf_model import build_model
from nemo_offload_rl.generation.stop_strings import AnswerText, needs_tokenizer
from nemo_offload_rl.generation.transformers_generator import TransformersGenerator

TEXT = "Let the sum be 12 + 30 = 42.\n\nThe answer is 42 — voilà 🙂🙃! 你好世界 " * 3


def bytes_tokenizer() -> Tokenizer:
    """Returns a tokenizer of 270 tokens, which encodes a character of several bytes as several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def words_tokenizer() -> Tokenizer:
    """Returns a tokenizer that writes a space before each word except the first of a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))
    return tokenizer


def first_end(tokenizer, stops, tokens, prompt=()) -> int | None:
    """Returns the number of tokens whose whole text first contains a stop string."""
    start = tokenizer.decode(list(prompt), skip_special_tokens=False)
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode([*prompt, *tokens[:end]], skip_special_tokens=False)[len(start) :]
        if not text.endswith("\ufffd") and any(stop in text for stop in stops):
            return end
    return None


def found_end(tokenizer, stops, tokens, prompt=()) -> int | None:
    text = AnswerText(tokenizer, stops, prompt)
    return next((end for end, token in enumerate(tokens, start=1) if text.add(token)), None)


@pytest.mark.parametrize("make", [bytes_tokenizer, words_tokenizer])
def test_every_string_is_found_with_the_token_that_completes_it(make):
    tokenizer, rng = make(), random.Random(0)
    tokens = tokenizer.encode(TEXT).ids
    text = tokenizer.decode(tokens)
    found = set()
    for _ in range(300):
        start, length = rng.randrange(len(text)), rng.randint(1, 12)
        stops = (text[start : start + length], "not there")
        end = found_end(tokenizer, stops, tokens)
        assert end == first_end(tokenizer, stops, tokens), stops
        found.add(end)
    assert None not in found
    assert len(found) > 15


def test_a_character_of_several_tokens_is_whole_before_it_is_found_and_odd_tokens_lose_nothing():
    tokenizer = bytes_tokenizer()
    smile, end = tokenizer.encode("🙂").ids, tokenizer.encode("end").ids
    assert len(smile) > 1
    assert found_end(tokenizer, ("🙂",), [*smile, *smile]) == len(smile)
    assert found_end(tokenizer, ("\ufffd",), smile) is None
    for odd in (smile[:1] * 2, [100_000]):  # bytes that are no character, and an id that is no token
        assert found_end(tokenizer, ("endend",), [*odd, *end, *end]) == len(odd) + 2 * len(end)
    special = [*tokenizer.encode("so").ids, tokenizer.token_to_id("<|end|>"), 3]
    assert found_end(tokenizer, ("<|end|>",), special) == len(special) - 1
    middle = len(end) // 2
    assert found_end(tokenizer, ("end",), [*end[:middle], 100_000, *end[middle:]]) == len(end) + 1


def test_the_prompts_text_does_not_count_but_spells_the_first_word():
    tokenizer = words_tokenizer()
    prompt, answer = tokenizer.encode("The answer").ids, tokenizer.encode("is 42.").ids
    assert found_end(tokenizer, (" is",), answer, prompt) == first_end(tokenizer, (" is",), answer, prompt) is not None
    assert found_end(tokenizer, ("answer is",), answer, prompt) is None
    assert found_end(tokenizer, (" is",), answer) is None


def test_a_prompt_that_ends_in_bytes_that_are_no_character_is_not_searched():
    tokenizer = bytes_tokenizer()
    prompt, answer = tokenizer.encode("The end \ufffd").ids, tokenizer.encode("so it is").ids
    assert found_end(tokenizer, ("end",), answer, prompt) is None
    assert found_end(tokenizer, ("it",), answer, prompt) == first_end(tokenizer, ("it",), answer) is not None


def test_an_engine_of_a_recipe_without_stop_strings_and_bad_words_has_no_tokenizer():
    assert not needs_tokenizer({"generation": {"stop_strings": None, "bad_words": []}})
    assert needs_tokenizer({"generation": {"stop_strings": ["a"], "bad_words": None}})
    assert needs_tokenizer({"generation": {"stop_strings": None, "bad_words": ["a"]}})
    sizes = {"generation_batch_size": 8, "max_sequence_length": 64}
    model = build_model("tiny", engine_conformance.QWEN3, "float32")
    generator = TransformersGenerator(model, device="cpu", has_weights=True, **sizes)
    for words in ({"stop_strings": ("a",)}, {"bad_words": ("a",)}):
        sampling = dataclasses.replace(engine_conformance.GREEDY, **words)
        with pytest.raises(RuntimeError, match="but the recipe had none when the engine was built"):
            generator.generate(engine_conformance.request(sampling))


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
