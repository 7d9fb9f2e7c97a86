"""Tests which results of a check are stored, and what users are told."""

import math

import pytest
from transformers import AutoConfig

from nemo_offload_rl.model_check import cache
from nemo_offload_rl.model_check.check import changed_flags, show_flags
from nemo_offload_rl.model_check.result import CheckResult, Difference, describe, refusal

RIGHT = CheckResult((Difference("padded", 3e-6, 2e-6, "model.norm.weight"),), "cpu", "local", {"model": 0.5})
WRONG = CheckResult(
    (Difference("padded", 3e-6, 2e-6, "a"), Difference("packed", 0.25, 2e-6, "b")), "a GPU", "Transformer Engine", {}
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nemo_offload_rl" / "model_check"


def test_what_rounding_makes_is_right_and_what_is_no_number_is_not():
    assert RIGHT.is_right
    assert not WRONG.is_right
    for logprob, gradient in ((2e-4, 0.0), (0.0, 2e-3), (math.nan, 0.0), (0.0, math.nan)):
        assert not Difference("padded", logprob, gradient, "a").is_rounding


def test_a_result_comes_back_from_its_file_as_it_was(folder):
    for result in (RIGHT, WRONG):
        cache.write("name", result)
        assert cache.read("name") == result
    assert [path.name for path in folder.iterdir()] == ["name.json"]  # no partial file is left
    cache.write("nan", CheckResult((Difference("padded", math.nan, 1.0, "a"),), "cpu", "local", {"model": 0.5}))
    kept = cache.read("nan")
    assert kept is not None
    assert not kept.is_right
    assert math.isnan(kept.worst.logprob)


@pytest.mark.parametrize("damaged", ["", "{", "[]", "3", '{"differences": []}', '{"differences": [1], "device": 2}'])
def test_a_damaged_entry_counts_as_none(folder, damaged):
    cache.write("name", RIGHT)
    (folder / "name.json").write_text(damaged)
    assert cache.read("name") is None
    cache.write("name", RIGHT)
    assert cache.read("name") == RIGHT


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache.write("name", RIGHT)
    assert cache.read("name") is None


def test_the_name_of_a_result_follows_what_decides_it(monkeypatch):
    section = {"hf_config": {"model_type": "llama", "rms_norm_eps": 1e-6}, "megatron_cfg": {}}
    names = {
        cache.key_of(section, device="cpu"),
        cache.key_of(section, device="a GPU"),
        cache.key_of(section | {"megatron_cfg": {"apply_rope_fusion": True}}, device="cpu"),
        cache.key_of(section | {"hf_config": {"model_type": "llama", "rms_norm_eps": 1e-5}}, device="cpu"),
    }
    assert len(names) == 4
    assert cache.key_of(dict(section), device="cpu") in names
    monkeypatch.setattr(cache, "_versions", lambda: {"torch": "3.0"})
    assert cache.key_of(section, device="cpu") not in names


def test_flags_that_are_not_the_familys_defaults_are_named_without_sizes():
    config = AutoConfig.for_model(
        "qwen2", use_sliding_window=True, sliding_window=512, max_window_layers=2, num_hidden_layers=4, vocab_size=99
    )
    flags = changed_flags(config.to_dict(), type(config)().to_dict())
    assert show_flags(flags)[:3] == ["use_sliding_window true", "sliding_window 512", "max_window_layers 2"]
    assert not flags.keys() & {"num_hidden_layers", "vocab_size", "architectures"}
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    config = AutoConfig.for_model("llama", rope_parameters=rope, num_hidden_layers=2)
    flags = changed_flags(config.to_dict(), type(config)().to_dict())
    assert flags == {"rope_parameters.rope_type": "linear", "rope_parameters.factor": 4.0}


def test_a_refusal_names_the_difference_the_flags_and_the_way_out():
    message = refusal(WRONG, "qwen2", ["use_sliding_window true"])
    assert "\n" not in message
    for part in ("qwen2", "differ by 0.25", "use_sliding_window true", "policy.skip_model_check", "padded and packed"):
        assert part in message
    assert "Transformer Engine's was not checked" in describe(RIGHT)
    assert "not checked" not in message
