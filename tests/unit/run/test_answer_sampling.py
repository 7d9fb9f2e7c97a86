"""Tests where answers end: from a model's folder to the engines, the metrics and the loss mask."""

import json
import logging
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_offload_rl.algorithms.rollouts import RolloutMaker
from nemo_offload_rl.data.problem import DataError, Problem
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.data.tokenizer import NONE_OUTSIDE, load_tokenizer
from nemo_offload_rl.environments import make_reward
from nemo_offload_rl.generation.hf_model import build_model
from nemo_offload_rl.generation.interface import GenerationRequest
from nemo_offload_rl.generation.transformers_generator import TransformersGenerator
from nemo_offload_rl.generation.vllm_arguments import sampling_arguments
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.answer_sampling import check_words, end_token_ids, make_sampling

GENERATION = {
    "max_new_tokens": 20,
    **{"temperature": 1.0, "top_p": 1.0, "top_k": None, "val_temperature": 0.0, "val_top_p": 1.0, "val_top_k": 3},
    **{"stop_token_ids": None, "stop_strings": None, "ignore_eos": False, "bad_words": None},
}
TEXT_END, TURN_END = 0, 1  # as in Qwen's chat models, the tokenizer has the second one as its end of sequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a model's folder with a BPE tokenizer and two ends, of which config.json and the tokenizer have one."""
    folder = tmp_path_factory.mktemp("model")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>"]
    bpe.train_from_iterator(["tea ate a tea at a tee"], trainers.BpeTrainer(vocab_size=14, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    model = {"model_type": "qwen3", "vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1}
    model |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16}
    model |= {"max_position_embeddings": 64, "eos_token_id": TURN_END}
    (folder / "config.json").write_text(json.dumps(model))
    own = {"eos_token_id": [TURN_END, TEXT_END], "do_sample": True, "temperature": 0.6, "top_k": 2, "top_p": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(own | {"repetition_penalty": 1.5}))
    return folder


def policy(folder, **generation):
    return {"model_name": str(folder), "hf_config": None, "generation": GENERATION | generation}


def test_answers_end_at_each_of_the_models_ends_and_are_complete(folder, caplog):
    tokenizer = load_tokenizer(str(folder))
    with caplog.at_level(logging.INFO):
        sampling, validation = make_sampling(policy(folder), tokenizer, seed=5)
    assert caplog.messages == ["Answers end at these tokens: 0 ('<|endoftext|>'), 1 ('<|im_end|>')."]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, None)
    assert (validation.temperature, validation.top_p, validation.top_k) == (0.0, 1.0, 3)
    request = GenerationRequest([[3, 4]], [0], 0, sampling)
    arguments = sampling_arguments(request, 0, 64)
    expected = {"stop_token_ids": [0, 1], "ignore_eos": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert {name: arguments[name] for name in expected} == expected
    assert not {name for name in arguments if "penalty" in name}

    model = build_model(str(folder), None, "float32")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    sizes = {"generation_batch_size": 64, "max_sequence_length": 64}
    engine = TransformersGenerator(model, device="cpu", has_weights=True, **sizes)
    maker = RolloutMaker(engine, PromptFormat(tokenizer, max_tokens=8), tokenizer, make_reward("exact_match"))
    rollouts = maker([Problem("tea", "ate")], 60, sampling, 1, Timer(), Counter())
    lasts = set()
    for row, truncated in enumerate(rollouts.truncated.tolist()):
        length = rollouts.batch["input_lengths"][row].item()
        is_trained = rollouts.batch["token_mask"][row] > 0
        *answer, last = rollouts.batch["input_ids"][row][is_trained].tolist()
        assert is_trained[length - 1]  # the end is part of the answer, and is trained
        assert not {TEXT_END, TURN_END} & set(answer)
        assert truncated == (last not in (TEXT_END, TURN_END))
        assert len(answer) == 19 or not truncated
        lasts.add(last)
    assert {TEXT_END, TURN_END} < lasts


def test_answers_end_where_vllm_ends_them_with_nemo_rls_arguments(folder, caplog):
    for keys, expected in (
        ({}, (7, 8, 9)),
        ({"stop_token_ids": [3]}, (3, 8, 9)),
        ({"stop_token_ids": []}, (8, 9)),
        ({"stop_token_ids": [], "stop_strings": ["x"]}, (7, 8, 9)),  # vLLM has the tokenizer, and so its end, too
        ({"stop_token_ids": [], "bad_words": ["x"]}, (7, 8, 9)),
        ({"ignore_eos": True}, (7,)),  # NeMo-RL gives the tokenizer's end as a stop token, which vLLM does not ignore
        ({"ignore_eos": True, "stop_token_ids": [3], "stop_strings": ["x"]}, (3,)),
        ({"ignore_eos": True, "stop_token_ids": []}, ()),
    ):
        assert end_token_ids(GENERATION | keys, model_ends=[9, 8], eos_token_id=7) == expected, keys
    with caplog.at_level(logging.INFO):
        make_sampling(policy(folder, ignore_eos=True, stop_token_ids=[]), load_tokenizer(str(folder)), seed=5)
    assert caplog.messages == ["Answers end at these tokens: none."]


def test_words_that_the_tokenizer_cannot_encode_are_refused(folder):
    tokenizer = load_tokenizer(str(folder))
    check_words(GENERATION | {"bad_words": ["tea", "<|endoftext|>"]}, tokenizer, NONE_OUTSIDE)
    with pytest.raises(DataError, match=r"policy\.generation\.bad_words has 'x', of which .* makes no token"):
        check_words(GENERATION | {"bad_words": ["tea", "x"]}, tokenizer, NONE_OUTSIDE)
    with pytest.raises(DataError, match=r"bad_words has '3', but in ' 3', which it stands for, ' ' is no token of"):
        check_words(GENERATION | {"bad_words": ["3"]}, load_tokenizer("arithmetic"), NONE_OUTSIDE)
    with pytest.raises(DataError, match=r"policy\.generation\.bad_words needs a fast tokenizer"):
        check_words(GENERATION | {"bad_words": ["a"]}, SimpleNamespace(get_vocab=dict), NONE_OUTSIDE)
