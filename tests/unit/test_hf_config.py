"""Tests the Hugging Face config of a recipe's model, and which imports reading it needs."""

import importlib
import json
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from nemo_offload_rl.hf_config import hf_config

READ = """
import sys, json
from nemo_offload_rl.hf_config import hf_config
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
