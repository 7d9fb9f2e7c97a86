"""The model's config in a recipe, held against what transformers declares."""

import dataclasses
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
        ("num_nextn_predict_layers", 1, "multi-token prediction is not supported here; set it to 0"),
        ("num_hidden_layers", "4", "must be int, as transformers says; found '4'; write it without quotes"),
        ("num_hidden_layers", 4.0, "must be int, as transformers says; found 4.0"),
        ("num_hidden_layers", True, "must be int, as transformers says; found true"),
        ("rms_norm_eps", math.nan, "must be float, as transformers says; found nan"),
        ("tie_word_embeddings", 1, "must be bool, as transformers says; found 1"),
        ("hidden_act", "slu", "must be an activation of transformers; found 'slu'; did you mean silu?"),
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
        ({"rope_type": "yarm"}, "rope_type", "found 'yarm'; did you mean yarn?"),
        (YARN | {"fctor": 4.0}, "fctor", "unknown key; nearest valid key: factor; rope_type yarn has attention_factor"),
        ({"factor": 4.0}, "factor", "unknown key; rope_type default has "),
        ({"rope_type": "yarn"}, "factor", "missing; rope_type yarn needs it"),
        (YARN | {"factor": "4"}, "factor", "must be float | None; found '4'"),
        (LLAMA3 | {"low_freq_factor": math.nan}, "low_freq_factor", "must be float | None; found nan"),
        (YARN | {"factor": None}, "factor", "missing; rope_type yarn needs it"),
    ],
)
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rotary_embeddings_are_held_against_transformers_validators(name, rope, key, message):
    found = problems_of({name: rope})
    assert message in found[f"policy.hf_config.{name}.{key}"]
    assert len(found) == 1


def test_rotary_embeddings_of_single_layer_types_are_checked_too():
    found = problems_of({"rope_parameters": {"full_attention": {"rope_type": "linear"}, "sliding_attention": 3}})
    assert set(found) == {
        "policy.hf_config.rope_parameters.full_attention.factor",
        "policy.hf_config.rope_parameters.sliding_attention",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {3: 4},
        {"hidden_size": [64]},
        {"hidden_size": {"a": 1}},
        {"hidden_act": ["silu"]},
        {"rope_parameters": {3: 4, "rope_type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": ["yarn"]}},
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
        (3, "must be a family that the installed transformers knows; found 3"),
        ("vit", "is 'vit', for which transformers has no causal language model; give another family"),
    ],
)
def test_the_family_is_named(model_type, message):
    found = problems_of({"model_type": model_type})
    assert message in found.pop("policy.hf_config.model_type")
    assert found == {}


def test_without_a_family_fields_are_those_of_any():
    found = dict(hf_config_problems({"hf_config": {"hidden_size": 8, "rope_thta": 1e6, "kv_lora_rank": 8}}))
    assert found["policy.hf_config.rope_thta"] == (
        "unknown key: no family of transformers has such field; nearest valid key: policy.hf_config.rope_theta"
    )
    assert set(found) == {"policy.hf_config.rope_thta", "policy.hf_config.model_type"}


def test_overrides_are_held_against_the_models_family():
    assert problems_of({}, hf_config_overrides={"rope_theta": 1e6, "num_hidden_layers": 2, "model_type": "qwen3"}) == {}
    found = problems_of({}, hf_config_overrides={"num_experts": 2, "model_type": "llama"})
    assert "unknown key: transformers' Qwen3Config" in found["policy.hf_config_overrides.num_experts"]
    assert "cannot be changed: the model's is 'qwen3'" in found["policy.hf_config_overrides.model_type"]


def test_overrides_of_a_hubs_model_are_held_against_any_family():
    assert of_hub(rope_theta=1e6, num_experts=4, q_lora_rank=None) == {}
    found = of_hub(num_hiden_layers=2)
    assert "no family of transformers has such field" in found["policy.hf_config_overrides.num_hiden_layers"]


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


def test_every_familys_own_defaults_are_valid():
    """Its declared ones; and every name that a config of it writes out is known."""
    for model_type in causal_models():
        known = family(model_type)
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
