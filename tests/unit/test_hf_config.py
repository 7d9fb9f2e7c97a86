"""Tests the Hugging Face config of a recipe's model, and which imports reading it needs."""

import importlib
import json
import subprocess
import sys

import huggingface_hub
import pytest
from transformers import AutoModelForCausalLM

from nemo_offload_rl.hf_config import generation_config, hf_config, model_end_token_ids

READ = """
import sys, json
from nemo_offload_rl.hf_config import generation_config, hf_config, model_end_token_ids
print(hf_config({"hf_config": {"model_type": "qwen3"}}).architectures[0])
print(json.dumps([name for name in sys.modules if name == "torch._dynamo" or "modeling_qwen3" in name]))
"""


def test_a_config_is_read_without_the_code_of_models_and_without_torchs_compiler():
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True)
    name, imported = done.stdout.splitlines()
    assert name == "Qwen3ForCausalLM"
    assert json.loads(imported) == []


def test_transformers_goes_on_writing_docstrings():
    module = importlib.import_module("transformers.utils.auto_docstring")
    before = module.auto_class_docstring
    hf_config({"hf_config": {"model_type": "olmo"}})
    assert module.auto_class_docstring is before
    assert before.__module__ == module.__name__


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe", "llama", "gemma3_text", "mistral", "gpt2", "gpt-sw3"])
def test_a_config_names_the_class_that_transformers_makes_of_it(model_type):
    config = hf_config({"hf_config": {"model_type": model_type}})
    assert config.architectures == [AutoModelForCausalLM._model_mapping[type(config)].__name__]


def model_folder(folder, **files):
    """Writes a model's JSON files; a name stands for NAME.json."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return {"model_name": str(folder), "hf_config": None}


CONFIG = {"model_type": "qwen3", "vocab_size": 50, "eos_token_id": 5}


ENDS = [
    ({"eos_token_id": [9, 7, 9]}, [7, 9]),
    ({"eos_token_id": 8}, [8]),
    ({"eos_token_id": [8, 50]}, [8]),  # outside the vocabulary, so never sampled
    ({"eos_token_id": None}, []),
    ({"temperature": 0.6}, []),  # as in transformers and vLLM, the file replaces what config.json says
    (None, [5]),
]


@pytest.mark.parametrize(("content", "expected"), ENDS)
def test_a_models_ends_are_those_of_its_generation_config_or_else_of_its_config(content, expected, tmp_path):
    files = {} if content is None else {"generation_config": content}
    policy = model_folder(tmp_path / "model", config=CONFIG, **files)
    assert model_end_token_ids(policy) == expected
    assert generation_config(policy) == content


def test_a_model_on_the_hub_has_the_same_ends(tmp_path, monkeypatch):
    """Reads a cache of the hub, which is not reachable."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--chat-model"
    model_folder(repository / "snapshots" / "0", config=CONFIG, generation_config={"eos_token_id": [7, 9]})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    policy = {"model_name": "some/chat-model", "hf_config": None}
    assert model_end_token_ids(policy) == [7, 9]
    (repository / "snapshots" / "0" / "generation_config.json").unlink()
    assert model_end_token_ids(policy) == [5]


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "gemma2", "mistral"])
def test_random_weights_have_the_ends_that_the_recipe_names(model_type, tmp_path):
    """Without the key, Llama would end at token 2 of whatever vocabulary the recipe has."""
    fields = {"model_type": model_type, "vocab_size": 50}
    assert model_end_token_ids({"model_name": "a label", "hf_config": fields}) == []
    named = {"model_name": "a label", "hf_config": fields | {"eos_token_id": [4, 3]}}
    assert model_end_token_ids(named) == [3, 4]
    assert model_end_token_ids(named | {"hf_config_overrides": {"eos_token_id": 6}}) == [6]
    hf_config({"hf_config": fields}).save_pretrained(tmp_path)
    assert model_end_token_ids({"model_name": str(tmp_path), "hf_config": None}) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1, true]}'])
def test_a_broken_generation_config_is_one_clear_error(content, tmp_path):
    policy = model_folder(tmp_path / "model", config=CONFIG, generation_config=content)
    with pytest.raises(ValueError, match=r"^The generation_config\.json of policy\.model_name '.*model' (is|h)"):
        model_end_token_ids(policy)
