"""The model's config in a recipe, held against what transformers declares."""

import math

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.activations import ACT2CLS
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin

from nemo_offload_rl.config import load
from nemo_offload_rl.config.installed.transformers_source import (
    activations,
    causal_models,
    family,
    layer_types,
    model_types,
    rope_validators,
)
from nemo_offload_rl.config.model.hf_check import hf_config_problems
from tests.support.tiny import TINY_DEEPSEEK_V3, TINY_QWEN3, TINY_QWEN3_MOE
from tests.unit.config.conftest import CONFIGS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def problems_of(fields, **policy):
    """What is wrong with these fields of a tiny qwen3."""
    return dict(hf_config_problems({"model_name": "x", "hf_config": TINY_QWEN3 | fields, **policy}))


def of_hub(**overrides):
    """What is wrong with overrides of a model of a hub, whose family is not known here."""
    return dict(hf_config_problems({"model_name": "org/model", "hf_config_overrides": overrides}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "num_hiden_layers",
            3,
            "unknown key: transformers' Qwen3Config has no such field; nearest valid key: "
            "policy.hf_config.num_hidden_layers",
        ),
        ("num_experts", 3, "unknown key: transformers' Qwen3Config has no such field"),
        ("num_nextn_predict_layers", 1, "multi-token prediction is not supported here; set it to 0; found 1"),
        (
            "num_hidden_layers",
            "4",
            "must be an integer, as transformers' Qwen3Config says; found '4'; write it without",
        ),
        ("num_hidden_layers", 4.0, "must be an integer, as transformers' Qwen3Config says; found 4.0"),
        ("num_hidden_layers", True, "must be an integer, as transformers' Qwen3Config says; found true"),
        ("num_hidden_layers", None, "must be an integer, as transformers' Qwen3Config says; found null"),
        ("num_hidden_layers", 0, "must be at least 1 and at most 10000; found 0"),
        ("num_hidden_layers", 10_001, "must be at least 1 and at most 10000; found 10001"),
        ("hidden_size", -64, "must be at least 1; found -64"),
        ("intermediate_size", -1, "must be at least 0; found -1"),
        ("rms_norm_eps", math.nan, "must be a finite number, as transformers' Qwen3Config says; found nan"),
        ("rms_norm_eps", math.inf, "must be a finite number, as transformers' Qwen3Config says; found inf"),
        ("rms_norm_eps", "small", "must be a number, as transformers' Qwen3Config says; found 'small'"),
        ("rms_norm_eps", 0.0, "must be above 0; found 0.0"),
        ("attention_dropout", 1.5, "must be from 0 to 1; found 1.5"),
        ("initializer_range", -0.02, "must be at least 0; found -0.02"),
        ("tie_word_embeddings", "true", "must be true or false, as transformers' Qwen3Config says; found 'true'"),
        ("tie_word_embeddings", 1, "must be true or false, as transformers' Qwen3Config says; found 1"),
        ("hidden_act", "slu", "'prelu' or 'xielu'; found 'slu'; did you mean silu?"),
        ("torch_dtype", "bf16", "must be 'float32', 'bfloat16' or 'float16'; found 'bf16'; did you mean bfloat16?"),
        ("layer_types", ["full_atention"], "found 'full_atention'; did you mean full_attention?"),
        ("eos_token_id", -1, "must be at least 0, or null for none; found -1"),
        ("rope_theta", 0, "must be above 0; found 0"),
        ("rope_theta", "1e6", "must be a number, as transformers' Qwen3Config says; found '1e6'; write it without"),
        ("rope_scaling", "yarn", "must be a mapping such as {rope_type: yarn, factor: 4.0}, or null; found 'yarn'"),
    ],
)
def test_a_field_is_held_against_its_declaration(field, value, message):
    [(path, found)] = problems_of({field: value}).items()
    assert path == f"policy.hf_config.{field}"
    assert message in found


@pytest.mark.parametrize(
    ("rope", "key", "message"),
    [
        ({"rope_type": "yarm"}, "rope_type", "'llama3' or 'proportional'; found 'yarm'; did you mean yarn?"),
        ({"type": 3}, "type", "found 3"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2}, "type", "is the old name of rope_type, which is 'yarn'"),
        (YARN | {"fctor": 4.0}, "fctor", "unknown key; nearest valid key: factor; rope_type yarn has attention_factor"),
        (YARN | {"low_freq_factor": 1.0}, "low_freq_factor", "unknown key; "),
        (
            {"factor": 4.0},
            "factor",
            "it is read only with rope_type 'linear', 'dynamic', 'yarn', 'longrope' or 'llama3'",
        ),
        ({"rope_type": "yarn"}, "factor", "missing; rope_type yarn needs it"),
        (YARN | {"factor": "4"}, "factor", "must be a number; found '4'"),
        (YARN | {"factor": None}, "factor", "must be a number; found null"),
        (YARN | {"factor": math.nan}, "factor", "must be a number; found nan"),
        (YARN | {"factor": 0.5}, "factor", "must be at least 1; found 0.5"),
        (YARN | {"beta_slow": -1}, "beta_slow", "must be above 0; found -1"),
        (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_fast", "must be above beta_slow (2); found 1"),
        (YARN | {"truncate": "no"}, "truncate", "must be true or false or null; found 'no'"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings", "must be at least 1"),
        (YARN | {"original_max_position_embeddings": 1.5}, "original_max_position_embeddings", "must be an integer"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor", "must be above low_freq_factor (1); found 1"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 8},
            "short_factor",
            "must have 8 numbers, one per pair of head dimensions; found 3",
        ),
        (
            {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 2},
            "partial_rotary_factor",
            "must be above 0 and",
        ),
    ],
)
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rotary_embeddings_are_held_against_transformers_validators(name, rope, key, message):
    found = problems_of({name: rope})
    assert message in found[f"policy.hf_config.{name}.{key}"]
    assert len(found) == 1 or "fctor" in rope


def test_rotary_embeddings_of_single_layer_types_are_checked_too():
    rope = {"full_attention": {"rope_type": "linear", "factor": 0}, "sliding_attention": 3}
    found = problems_of({"rope_parameters": rope})
    assert found == {
        "policy.hf_config.rope_parameters.full_attention.factor": "must be at least 1; found 0",
        "policy.hf_config.rope_parameters.sliding_attention": "must be a mapping with rope_type; found 3",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {3: 4},
        {"hidden_size": [64]},
        {"hidden_size": {"a": 1}},
        {"hidden_act": ["silu"]},
        {"torch_dtype": {}},
        {"layer_types": [[1]]},
        {"rope_parameters": {3: 4, "rope_type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": ["yarn"]}},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": ["a"], "long_factor": None}},
        {"rope_parameters": [1]},
        {"model_type": ["qwen3"]},
        {"model_type": {"qwen3": 1}},
    ],
    ids=str,
)
def test_odd_structures_are_answered_in_words(fields):
    found = problems_of(fields)
    assert found
    assert all(path.startswith("policy.hf_config.") for path in found)


def test_what_is_said_twice_is_refused():
    both = problems_of({"rope_parameters": YARN, "rope_scaling": YARN})
    assert (
        "is the old name of rope_parameters, which is also set; delete one of them"
        in both["policy.hf_config.rope_scaling"]
    )
    theta = problems_of({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4})
    assert "but policy.hf_config.rope_parameters.rope_theta is 1000000.0" in theta["policy.hf_config.rope_theta"]
    assert problems_of({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e6}) == {}
    experts = TINY_QWEN3_MOE | {"num_local_experts": 8}
    [found] = dict(hf_config_problems({"hf_config": experts})).values()
    assert "is 4, but policy.hf_config.num_local_experts, another name of it, is 8" in found


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 10000, "rope_scaling": YARN},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "rope_type": "llama3"}},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_scaling": None, "rms_norm_eps": 1, "sliding_window": None, "attention_dropout": 0},
        {
            "architectures": ["Qwen3ForCausalLM"],
            "transformers_version": "5.0",
            "torch_dtype": "bfloat16",
            "use_cache": True,
        },
        {"bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": None, "num_nextn_predict_layers": 0},
        {"name_or_path": "x", "num_labels": 2, "id2label": {0: "a"}, "attn_implementation": "sdpa"},
    ],
)
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


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (None, "missing; it names the model's family for transformers, such as qwen3 or llama"),
        ("quen3", "must be a family that the installed transformers knows; found 'quen3'; did you mean qwen3?"),
        (3, "must be text; found 3"),
        ("vit", "is 'vit', for which transformers has no causal language model; give another family"),
    ],
)
def test_the_family_is_named(model_type, message):
    found = problems_of({"model_type": model_type})
    assert message in found.pop("policy.hf_config.model_type")
    assert found == {}


def test_without_a_family_fields_are_those_of_any():
    found = dict(hf_config_problems({"hf_config": {"hidden_size": -1, "rope_thta": 1e6, "kv_lora_rank": 8}}))
    assert found["policy.hf_config.hidden_size"] == "must be at least 1; found -1"
    assert found["policy.hf_config.rope_thta"] == (
        "unknown key: no family of transformers has such a field; nearest valid key: policy.hf_config.rope_theta"
    )
    assert set(found) == {"policy.hf_config.hidden_size", "policy.hf_config.rope_thta", "policy.hf_config.model_type"}


def test_overrides_are_held_against_the_models_family():
    assert problems_of({}, hf_config_overrides={"rope_theta": 1e6, "num_hidden_layers": 2, "model_type": "qwen3"}) == {}
    found = problems_of({}, hf_config_overrides={"num_experts": 2, "model_type": "llama"})
    assert "unknown key: transformers' Qwen3Config" in found["policy.hf_config_overrides.num_experts"]
    assert "cannot be changed: the model's is 'qwen3'" in found["policy.hf_config_overrides.model_type"]


def test_overrides_of_a_hubs_model_are_held_against_any_family():
    assert of_hub(rope_theta=1e6, num_experts=4, q_lora_rank=None) == {}
    found = of_hub(num_hiden_layers=2, rms_norm_eps="x")
    assert "no family of transformers has such a field" in found["policy.hf_config_overrides.num_hiden_layers"]
    assert "must be a number" in found["policy.hf_config_overrides.rms_norm_eps"]


def test_every_mistake_is_told_at_once_where_it_was_written(error_of):
    error = error_of(
        "~warm_start", "+policy.hf_config.num_hiden_layers=2", "policy.hf_config.hidden_size=x", "grpo.seed=x"
    )
    assert ": 3 problems\n" in error
    assert "command line: +policy.hf_config.num_hiden_layers=2: policy.hf_config.num_hiden_layers: unknown key" in error
    load(CONFIGS / "grpo_tiny_cpu.yaml")


def test_families_are_those_of_the_imported_library():
    registered_by_others = set(CONFIG_MAPPING._extra_content)  # Megatron-Bridge does so where it is imported
    assert set(model_types()) == set(CONFIG_MAPPING.keys()) - registered_by_others
    of_library = {config.model_type for config in AutoModelForCausalLM._model_mapping} - registered_by_others
    assert of_library <= set(causal_models())


def test_words_are_those_of_the_imported_library():
    assert layer_types() == ALLOWED_LAYER_TYPES
    assert activations() == tuple(ACT2CLS)
    for rope_type in rope_validators():
        assert hasattr(RotaryEmbeddingConfigMixin, f"_validate_{rope_type}_rope_parameters")


@pytest.mark.parametrize("model_type", sorted(causal_models()))
def test_every_familys_own_defaults_are_valid(model_type):
    """Its declared ones; and every name that a config of it writes out is known."""
    known = family(model_type)
    assert known is not None
    declared = {name: _as_yaml(field.default) for name, field in known.fields.items() if field.default is not None}
    found = dict(hf_config_problems({"hf_config": {"model_type": model_type} | declared}))
    assert found == {}
    if model_type in ("musicgen", "musicgen_melody"):  # have no defaults
        return
    config = CONFIG_MAPPING[model_type]()
    assert type(config).__name__ == known.class_name
    unknown = [name for name in config.to_dict() if not name.startswith("_") and known.field(name) is None]
    assert unknown == []


def _as_yaml(value):
    return [_as_yaml(item) for item in value] if isinstance(value, list | tuple) else value
