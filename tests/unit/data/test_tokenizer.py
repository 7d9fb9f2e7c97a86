"""Tests that a tokenizer is the one that its tokenizer.json describes, whatever class its files name."""

import json
import logging

import pytest
from support import everyday
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer, load_tokenizer, save_tokenizer

TEXTS = ["the sum of 2 numbers", "some  people\n\nask", "a<|im_start|>user\nname<|im_end|>", "naïve 是"]


def name_class(folder, name, model_type, **options):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tokenizer_class": name} | options))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("LlamaTokenizerFast", "llama"), ("LlamaTokenizer", "llama"), ("LlamaTokenizerFast", "qwen3")],
)
def test_a_byte_level_tokenizer_of_another_class_keeps_its_blanks(tmp_path, caplog, name, model_type):
    everyday.make_tokenizer(tmp_path, bos="<s>", pad=everyday.END_OF_TEXT)
    name_class(tmp_path, name, model_type)
    caplog.set_level(logging.WARNING)
    tokenizer = load_tokenizer(str(tmp_path))
    assert "is read as its tokenizer.json says; transformers would read it as a LlamaTokenizer" in caplog.text
    save_tokenizer(tokenizer, tmp_path / "saved")
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for one in (tokenizer, load_tokenizer(str(tmp_path / "saved"))):
        for text in TEXTS:
            ids = one(text, add_special_tokens=False)["input_ids"]
            assert ids == file.encode(text, add_special_tokens=False).ids
            assert one.decode(ids) == text
        assert (one.bos_token, one.eos_token, one.pad_token) == ("<s>", everyday.TURN_END, everyday.END_OF_TEXT)
        assert one.chat_template == everyday.CHATML


def test_a_blank_that_the_config_adds_is_added(tmp_path, caplog):
    everyday.make_tokenizer(tmp_path, bos="<s>", pad=everyday.END_OF_TEXT)
    name_class(tmp_path, "GPT2TokenizerFast", "gpt2", add_prefix_space=True)
    caplog.set_level(logging.WARNING)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer("a b", add_special_tokens=False) == tokenizer(" a b", add_special_tokens=False)
    assert not caplog.records


def test_a_tokenizer_of_the_class_that_it_names_is_left_as_it_is(tmp_path, caplog):
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ends = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(ends)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path)
    backend.enable_padding(length=200)  # some files have settings of their model's training
    backend.enable_truncation(5)
    backend.save(str(tmp_path / "tokenizer.json"))
    name_class(tmp_path, "LlamaTokenizerFast", "llama")
    caplog.set_level(logging.WARNING)
    assert type(load_tokenizer(str(tmp_path))).__name__ == "LlamaTokenizer"
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "model_type"), [(None, "qwen2"), ("Qwen2Tokenizer", "llama"), ("BertTokenizer", "llama")]
)
def test_a_closed_vocabulary_of_which_a_class_would_make_another_tokenizer(tmp_path, name, model_type):
    arithmetic_tokenizer().save_pretrained(tmp_path)
    name_class(tmp_path, name, model_type)
    tokenizer = load_tokenizer(str(tmp_path))
    assert type(tokenizer.backend_tokenizer.model) is models.WordLevel
    assert tokenizer("12+3=")["input_ids"] == [1, 2, 10, 3, 11]


def test_a_saved_tokenizer_has_special_tokens_by_the_name_that_transformers_4_reads(tmp_path):
    everyday.make_tokenizer(tmp_path, bos="<s>", pad=everyday.END_OF_TEXT)
    name_class(tmp_path, "Qwen2Tokenizer", "qwen2")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"additional_special_tokens": ["<|im_start|>"]}))
    tokenizer = load_tokenizer(str(tmp_path))
    save_tokenizer(tokenizer, tmp_path / "saved")
    fields = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert fields["additional_special_tokens"] == ["<|im_start|>"]
    assert "extra_special_tokens" not in fields
    loaded = load_tokenizer(str(tmp_path / "saved"))
    assert type(loaded) is type(tokenizer)
    assert loaded.all_special_tokens == tokenizer.all_special_tokens
    assert loaded.get_vocab() == tokenizer.get_vocab()
