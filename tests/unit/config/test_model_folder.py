"""Where a recipe says that its model is."""

import json

import pytest

from nemo_offload_rl.cli import main
from nemo_offload_rl.config.model.hf_check import ModelFolderError, check_model_folder
from tests.unit.config.conftest import CONFIGS


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
    with pytest.raises(
        ModelFolderError, match=r"model\.safetensors\.index\.json is not a valid index of weights \(TypeError"
    ):
        check(tmp_path)


def test_commands_say_it_at_once_and_plain_validation_looks_at_no_folder(capsys):
    recipe = [str(CONFIGS / "sft_tiny_cpu.yaml"), "policy.model_name=./nope", "policy.hf_config=null"]
    for command in (["validate", "--deep"], ["plan"]):
        assert main([*command, *recipe]) == 2
        assert "policy.model_name is './nope', but there is no such folder" in capsys.readouterr().err
    assert main(["validate", *recipe]) == 0
