"""The model of a recipe: its config held against transformers, its folder, and overrides of its fields."""

import dataclasses
import json

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.activations import ACT2CLS
from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin

from nemo_offload_rl.cli import main
from nemo_offload_rl.config import load
from nemo_offload_rl.config.installed import transformers_source
from nemo_offload_rl.config.model.hf_check import ModelFolderError, check_model_folder, hf_config_problems
from nemo_offload_rl.mcore.model import model_config
from tests.support.tiny import TINY_DEEPSEEK_V3, TINY_QWEN3, TINY_QWEN3_MOE
from tests.unit.config.conftest import CONFIGS, MEGATRON

TINY = CONFIGS / "grpo_tiny_cpu.yaml"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def problems_of(fields, **policy):
    """What is wrong with these fields of a tiny qwen3."""
    return dict(hf_config_problems({"model_name": "x", "hf_config": TINY_QWEN3 | fields, **policy}))


ODD_FIELDS = [
    {3: 4}, {"hidden_size": [64]}, {"hidden_size": {"a": 1}}, {"hidden_act": ["silu"]},
    {"rope_parameters": {3: 4, "rope_type": "linear", "factor": 2}}, {"rope_parameters": {"rope_type": ["yarn"]}},
    {"rope_parameters": [1]}, {"model_type": ["qwen3"]}, {"model_type": {"qwen3": 1}},
]  # fmt: skip


@pytest.mark.parametrize("fields", ODD_FIELDS, ids=str)
def test_odd_structures_are_answered_in_words(fields):
    found = problems_of(fields)
    assert found
    assert all(path.startswith("policy.hf_config.") for path in found)


GOOD_FIELDS = [
    {"rope_theta": 10000, "rope_scaling": YARN},
    {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "rope_type": "llama3"}},
    {"rope_scaling": {"type": "linear", "factor": 2}},
    {"rope_scaling": None, "rms_norm_eps": 1, "sliding_window": None, "attention_dropout": 0},
    {"architectures": ["Qwen3ForCausalLM"], "transformers_version": "5.0"},
    {"torch_dtype": "bfloat16", "use_cache": True},
    {"bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": None, "num_nextn_predict_layers": 0},
    {"name_or_path": "x", "num_labels": 2, "id2label": {0: "a"}, "attn_implementation": "sdpa"},
]


@pytest.mark.parametrize("fields", GOOD_FIELDS)
def test_what_transformers_takes_is_taken(fields):
    assert problems_of(fields) == {}
    CONFIG_MAPPING["qwen3"](**{k: float(v) if k == "rms_norm_eps" else v for k, v in (TINY_QWEN3 | fields).items()})


@pytest.mark.parametrize(
    "fields", [TINY_QWEN3, TINY_QWEN3_MOE, TINY_DEEPSEEK_V3], ids=lambda fields: fields["model_type"]
)
def test_tiny_models_are_valid(fields):
    assert dict(hf_config_problems({"hf_config": fields})) == {}


def test_either_name_of_a_field_is_known():
    """Its config maps num_experts to num_local_experts; head_dim it does not declare, and its layers read."""
    fields = {name: value for name, value in TINY_QWEN3_MOE.items() if name != "num_experts"}
    assert "head_dim" in fields
    assert dict(hf_config_problems({"hf_config": fields | {"num_local_experts": 4}})) == {}


def test_without_a_family_fields_are_those_of_any():
    found = dict(hf_config_problems({"hf_config": {"hidden_size": 8, "rope_thta": 1e6, "kv_lora_rank": 8}}))
    assert set(found) == {"policy.hf_config.rope_thta", "policy.hf_config.model_type"}


def test_families_are_those_of_the_imported_library():
    registered_by_others = set(CONFIG_MAPPING._extra_content)  # Megatron-Bridge does so where it is imported
    assert set(transformers_source.model_types()) == set(CONFIG_MAPPING.keys()) - registered_by_others
    of_library = {config.model_type for config in AutoModelForCausalLM._model_mapping} - registered_by_others
    assert of_library <= set(transformers_source.causal_models())


def test_words_are_those_of_the_imported_library():
    assert transformers_source.activations() == tuple(ACT2CLS)
    for rope_type in transformers_source.rope_validators():
        assert hasattr(RotaryEmbeddingConfigMixin, f"_validate_{rope_type}_rope_parameters")


def test_every_familys_own_defaults_are_valid():
    """Its declared ones; and every name that a config of it writes out is known."""
    for model_type in transformers_source.causal_models():
        known = transformers_source.family(model_type)
        assert known is not None, model_type
        own = dataclasses.fields(CONFIG_MAPPING[model_type])
        declared = {one.name: _as_yaml(one.default) for one in own if isinstance(one.default, int | float | str | list)}
        found = dict(hf_config_problems({"hf_config": {"model_type": model_type} | declared}))
        assert found == {}, model_type
        if model_type in ("musicgen", "musicgen_melody"):  # have no defaults
            continue
        config = CONFIG_MAPPING[model_type]()
        assert type(config).__name__ == known.class_name
        unknown = [name for name in config.to_dict() if not name.startswith("_") and not known.has(name)]
        assert unknown == [], model_type


def _as_yaml(value):
    return [_as_yaml(item) for item in value] if isinstance(value, list | tuple) else value


def check(name, hf_config=None, needs_weights=True, **sections):
    policy = {"model_name": str(name), "hf_config": hf_config}
    check_model_folder({"policy": policy, **sections}, needs_weights=needs_weights)


@pytest.mark.parametrize("name", ["./nope", "../nope/model", "/nope", "~/nope", "a/b/c", "nope/"])
def test_a_path_that_is_not_there_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFolderError, match=r"^policy\.model_name is '.*', but there is no such folder"):
        check(name)
    check(name, hf_config={"model_type": "qwen3"})  # a label
    check(name, warm_start={"recipe": "sft.yaml"})  # which makes the model
    for of_hub in ("gpt2", "Qwen/Qwen3-0.6B"):  # these are left to others
        check(of_hub)


def test_a_remedy_is_named(tmp_path):
    (tmp_path / "qwen3-tiny").mkdir()
    with pytest.raises(ModelFolderError, match=r"\(did you mean .*/qwen3-tiny\?\)"):
        check(tmp_path / "qwen3-tny")
    with pytest.raises(ModelFolderError, match=r"\(nor .*/absent\)"):
        check(tmp_path / "absent" / "model")
    with pytest.raises(ModelFolderError, match=r"\(~ is not the home folder in a recipe\)"):
        check("~/model")


def test_a_folder_is_a_whole_model(tmp_path):
    with pytest.raises(ModelFolderError, match=r"a folder without a config\.json; give one in Hugging Face format\.$"):
        check(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{")
    with pytest.raises(ModelFolderError, match=r"whose config\.json is not valid JSON"):
        check(tmp_path)
    with pytest.raises(ModelFolderError, match=r"config\.json', which is a file; give the model's folder"):
        check(config)
    config.write_text("{}")
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')
    (tmp_path / "pytorch_model-2.bin").touch()
    with pytest.raises(ModelFolderError, match=r"with a config\.json and no weights"):
        check(tmp_path)
    check(tmp_path, needs_weights=False)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(ModelFolderError, match=r"without model-2\.safetensors, which its index lists"):
        check(tmp_path)
    (tmp_path / "model-2.safetensors").touch()
    check(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelFolderError, match=r"safetensors\.index\.json is not a valid index of weights \(TypeError"):
        check(tmp_path)


def test_commands_say_it_at_once_and_plain_validation_looks_at_no_folder(capsys):
    recipe = [str(CONFIGS / "sft_tiny_cpu.yaml"), "policy.model_name=./nope", "policy.hf_config=null"]
    for command in (["validate", "--deep"], ["plan"]):
        assert main([*command, *recipe]) == 2
        assert "policy.model_name is './nope', but there is no such folder" in capsys.readouterr().err
    assert main(["validate", *recipe]) == 0


def test_a_field_means_the_same_as_in_the_section_and_reaches_the_model():
    fields = "{rotary_interleaved: true, layernorm_epsilon: 0.001}"
    written = [f"++{MEGATRON}.rotary_interleaved=true", f"++{MEGATRON}.layernorm_epsilon=0.001"]
    overridden = load(TINY, [f"++{MEGATRON}.model_overrides={fields}"])
    assert overridden.config == load(TINY, [f"++{MEGATRON}.model_overrides={{}}", *written]).config
    assert overridden.recipe.config["policy"]["megatron_cfg"]["model_overrides"]["rotary_interleaved"] is True

    policy = overridden.config["policy"]
    provider = model_config.make_provider(policy, model_config.make_bridge(policy, model_config.hf_config(policy)))
    assert (provider.rotary_interleaved, provider.layernorm_epsilon) == (True, 0.001)


def test_a_field_is_refused_where_it_is_written(tmp_path, error_of):
    for field, also in (
        ("maskd_softmax_fusion: false", ""),
        ("moe_z_loss_coeff: 'x'", ""),
        ("hidden_size: 64", ""),
        ("fp8: 'e4m3'", ""),
        ("sequence_parallel: true", ""),
        ("defer_fp32_logits: true", ""),
        ("layernorm_epsilon: 0.1", "layernorm_epsilon: 0.2"),
        ("window_size: null", ""),
        ("moe_pad_expert_input_to_capacity: true", ""),  # by a rule between two keys
    ):
        text = f"defaults: {TINY}\npolicy:\n  megatron_cfg:\n    {also}\n    model_overrides:\n      {field}\n"
        (tmp_path / "recipe.yaml").write_text(text)
        error_of(recipe=tmp_path / "recipe.yaml")
