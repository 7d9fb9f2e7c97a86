"""Tests that code in the files of a model or tokenizer only runs where the recipe says so, and that nothing asks."""

import json
import sys
from pathlib import Path

import pytest
import transformers.dynamic_module_utils
from support.tiny import TINY_QWEN3, tiny_policy

from nemo_offload_rl.config import load
from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer, load_tokenizer
from nemo_offload_rl.generation.hf_model import build_model
from nemo_offload_rl.generation.vllm_arguments import engine_arguments
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.mcore.model.model_config import make_bridge

CODE = {
    "configuration_own": "from transformers import Qwen3Config\nclass Own(Qwen3Config):\n    model_type = 'own'\n",
    "modeling_own": (
        "from transformers import Qwen3ForCausalLM\nfrom .configuration_own import Own\n"
        "class OwnModel(Qwen3ForCausalLM):\n    config_class = Own\n"
    ),
    "tokenization_own": (
        "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    own = 1\n"
    ),
}


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """Returns a folder whose config, model and tokenizer have code of their own; reading standard input fails."""
    folder = tmp_path / "own"
    arithmetic_tokenizer().save_pretrained(folder)
    for name, text in CODE.items():
        (folder / f"{name}.py").write_text(text)
    auto_map = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config = TINY_QWEN3 | {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": auto_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def asked(question):
        raise AssertionError(question)

    monkeypatch.setattr("builtins.input", asked)
    return folder


def test_code_of_its_own_runs_only_with_the_key(own_code):
    name = str(own_code)
    with pytest.raises(ValueError, match=r"^policy\.model_name is .*only runs with policy\.trust_remote_code: true"):
        hf_config({"model_name": name, "trust_remote_code": False})
    with pytest.raises(ValueError, match=r"policy\.trust_remote_code: true"):
        build_model(name, None, "float32")
    config = hf_config({"model_name": name, "trust_remote_code": True})
    assert (config.model_type, type(config).__name__) == ("own", "Own")
    assert type(build_model(name, None, "float32", trust_remote_code=True)).__name__ == "OwnModel"


def test_a_tokenizers_code_runs_only_with_the_key(own_code):
    with pytest.raises(DataError, match=r"^policy\.tokenizer\.name is .*only runs with policy\.trust_remote_code: "):
        load_tokenizer(str(own_code))
    assert load_tokenizer(str(own_code), trust_remote_code=True).own == 1


@pytest.mark.parametrize("trusts", [False, True])
def test_bridge_and_vllm_get_the_keys_value(own_code, trusts):
    config = TINY_QWEN3 | {"architectures": ["Qwen3ForCausalLM"]}
    (own_code / "config.json").write_text(json.dumps(config))
    of_folder = tiny_policy() | {"trust_remote_code": trusts, "model_name": str(own_code), "hf_config": None}
    assert make_bridge(of_folder, hf_config(of_folder)).hf_pretrained.trust_remote_code is trusts
    vllm = ["policy.generation.backend=vllm", "+policy.generation.vllm_cfg.build_beside_policy=false"]
    key = f"++policy.trust_remote_code={str(trusts).lower()}"
    policy = load("examples/configs/grpo_tiny_cpu.yaml", [*vllm, key]).config["policy"]
    assert engine_arguments(policy, Path("folder"))["trust_remote_code"] is trusts


def test_a_line_says_that_code_runs():
    recipe = "examples/configs/sft_tiny_cpu.yaml"
    assert load(recipe).config["policy"]["trust_remote_code"] is False
    notes = load(recipe, ["++policy.trust_remote_code=true"]).notes
    assert len([note for note in notes if note.startswith("policy.trust_remote_code is true: code in")]) == 1
