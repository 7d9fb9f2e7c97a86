"""Tests which results of a check are stored, and what users are told."""

import math
from pathlib import Path

import pytest
from transformers import AutoConfig

from nemo_offload_rl.model_check import cache
from nemo_offload_rl.model_check.check import changed_flags, show_flags
from nemo_offload_rl.model_check.result import CheckResult, Difference, describe, refusal
from nemo_offload_rl.model_check.twin import ORIGINAL_LENGTH, ROW_LENGTH, WINDOW, twin_of

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

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)  # a container with a user that its passwd does not know
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


def whole(model_type, **fields):
    return AutoConfig.for_model(model_type, **fields).to_dict()


def test_flags_stay_and_sizes_shrink():
    config = whole("llama", tie_word_embeddings=True, rms_norm_eps=1e-3, hidden_act="gelu", attention_bias=True)
    twin = twin_of(config)
    assert twin.keys() == config.keys()
    kept = ("tie_word_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "model_type")
    assert {key: twin[key] for key in kept} == {key: config[key] for key in kept}
    assert (twin["num_hidden_layers"], twin["num_attention_heads"], twin["num_key_value_heads"]) == (2, 4, 4)
    assert twin["hidden_size"] == 4 * twin["head_dim"] == 64


@pytest.mark.parametrize(("head_dim", "hidden_size"), [(64, 4096), (128, 64 // 2 * 128), (256, 4096)])
def test_heads_are_as_wide_as_the_model_only_where_they_were(head_dim, hidden_size):
    config = whole("qwen3", head_dim=head_dim, hidden_size=hidden_size, num_attention_heads=32)
    twin = twin_of(config)
    wanted = (head_dim * 32 > hidden_size) - (head_dim * 32 < hidden_size)
    width = twin["head_dim"] * twin["num_attention_heads"]
    assert (width > twin["hidden_size"]) - (width < twin["hidden_size"]) == wanted


FULL, SLIDING = "full_attention", "sliding_attention"
LATE = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28, "num_hidden_layers": 32}
LATE_TWIN = {"layer_types": [FULL, SLIDING], "num_hidden_layers": 2, "max_window_layers": 1}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
YARN_TWIN = {
    "rope_parameters": YARN | {"original_max_position_embeddings": ORIGINAL_LENGTH},
    "max_position_embeddings": 4 * ORIGINAL_LENGTH,
}
DENSE_0_5_20 = {"mlp_only_layers": [0, 5, 20], "num_hidden_layers": 24}
DENSE_20 = {"mlp_only_layers": [20], "num_hidden_layers": 24}
SPARSE = {"decoder_sparse_step": 2}
DENSE_FIRST = {"first_k_dense_replace": 3}
SCALE = {"query_pre_attn_scalar": 144, "head_dim": 128}
# The family, fields of the model, and those of its twin.
TWINS = {
    "32 heads of 32 keys": ("llama", {"num_key_value_heads": 32}, {"num_key_value_heads": 4}),
    "four heads share keys": ("llama", {"num_key_value_heads": 8}, {"num_key_value_heads": 2}),
    "all heads share keys": ("llama", {"num_key_value_heads": 1}, {"num_key_value_heads": 1}),
    "windows are crossed by the rows": ("mistral", {"sliding_window": 4096}, {"sliding_window": WINDOW}),
    "no windows": ("mistral", {"sliding_window": None}, {"sliding_window": None}),
    "layers that become windowed late do so": ("qwen2", LATE, LATE_TWIN),
    "a pattern of six layers": ("gemma3_text", {}, {"layer_types": [*[SLIDING] * 5, FULL, SLIDING]}),
    "a pattern of two layers": ("gemma2", {}, {"layer_types": [SLIDING, FULL, SLIDING]}),
    "the first layer is dense": ("qwen3_moe", DENSE_0_5_20, {"num_hidden_layers": 3, "mlp_only_layers": [0]}),
    "a late layer is dense": ("qwen3_moe", DENSE_20, {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "every other layer is dense": ("qwen3_moe", SPARSE, SPARSE | {"num_hidden_layers": 3}),
    "the first layers are dense": ("deepseek_v3", DENSE_FIRST, DENSE_FIRST | {"num_hidden_layers": 5}),
    "groups of experts can be chosen from": ("deepseek_v3", {}, GROUPS),
    "the softmax scale of heads of 256": ("gemma2", {}, {"query_pre_attn_scalar": 16}),
    "a softmax scale of its own": ("gemma2", SCALE, {"query_pre_attn_scalar": 18}),
    "rope scaling": ("qwen3", {"rope_parameters": YARN, "max_position_embeddings": 131072}, YARN_TWIN),
}


@pytest.mark.parametrize(("family", "fields", "wanted"), TWINS.values(), ids=TWINS)
def test_what_decides_about_a_model_is_in_its_twin(family, fields, wanted):
    assert twin_of(whole(family, **fields)).items() >= wanted.items()


def test_sizes_of_heads_add_up_and_rope_scaling_begins_within_the_rows():
    twin = twin_of(whole("deepseek_v3"))
    assert twin["qk_head_dim"] == twin["qk_nope_head_dim"] + twin["qk_rope_head_dim"]
    assert max(ORIGINAL_LENGTH, WINDOW) < ROW_LENGTH
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert twin_of(whole("llama", rope_parameters=dynamic))["max_position_embeddings"] < ROW_LENGTH


def test_a_twin_of_a_twin_is_itself():
    for family in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "deepseek_v3"):
        twin = twin_of(whole(family))
        assert twin_of(twin) | {"num_hidden_layers": twin["num_hidden_layers"]} == twin, family
