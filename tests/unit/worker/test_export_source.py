"""Tests that an export checks its checkpoint before torch is imported."""

import json

import pytest
import yaml

from nemo_offload_rl.storage.manifest import DamagedCheckpointError, write_manifest
from nemo_offload_rl.worker.export import export_checkpoint
from nemo_offload_rl.worker.export_source import read_export_source


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "results" / "step_10"
    (folder / "policy" / "hf_config").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    (folder / "policy" / "metadata.json").write_text("{}")
    (folder / "policy" / "hf_config" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"policy": {"precision": "float32"}}))
    return folder


def error_of(checkpoint, folder):
    with pytest.raises(ValueError, match=r"\S") as caught:
        read_export_source(checkpoint, folder)
    return str(caught.value)


def test_a_checkpoint_is_read_with_values_for_keys_that_it_lacks(checkpoint, tmp_path):
    source = read_export_source(checkpoint, tmp_path / "hf")
    assert source.policy == checkpoint / "policy"
    assert source.tokenizer == checkpoint / "tokenizer"
    assert source.hf_config == {"model_type": "qwen3"}
    assert source.recipe["policy"]["precision"] == "float32"
    assert source.recipe["policy"]["refit_buffer_size_gb"] == 1.0  # an earlier version did not write this key


def test_what_is_no_checkpoint_is_said_with_what_to_give_instead(checkpoint, tmp_path):
    results, model = checkpoint.parent, tmp_path / "model"
    (results / "step_9").mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")
    for given, message in {
        tmp_path / "nope": "nope does not exist; give a checkpoint's folder",
        checkpoint / "recipe.yaml": "recipe.yaml is a file; give a checkpoint's folder",
        results: f"give one of the checkpoints in it, such as {checkpoint}.",  # the newest
        model: "it is a Hugging Face folder already",
        results / "step_9": "give a checkpoint's folder, such as .../step_100.",
    }.items():
        assert message in error_of(given, tmp_path / "hf")


def test_a_folder_that_holds_something_else_is_not_written_to(checkpoint, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    read_export_source(checkpoint, folder)  # an empty folder
    (folder / "notes.txt").write_text("mine")
    assert f"{folder} is not empty and holds no model; give an empty or new folder." in error_of(checkpoint, folder)
    (folder / "config.json").write_text("{}")
    read_export_source(checkpoint, folder)  # an earlier export, which is overwritten
    assert "notes.txt is a file; give an empty or new folder." in error_of(checkpoint, folder / "notes.txt")


DAMAGES = [
    ("recipe.yaml", "a: [1\n", "recipe.yaml cannot be read: "),
    ("recipe.yaml", "a: 1\n", "recipe.yaml was not written by a run: it has no policy"),
    ("policy/hf_config/config.json", "{", "config.json cannot be read: "),
    ("policy/hf_config/config.json", "[]", "config.json was not written by a run: it has no model_type"),
]


@pytest.mark.parametrize(("name", "text", "message"), DAMAGES)
def test_a_part_that_is_damaged_is_named(checkpoint, tmp_path, name, text, message):
    (checkpoint / name).write_text(text)
    error = error_of(checkpoint, tmp_path / "hf")
    assert message in error
    assert error.endswith("; take another checkpoint.")


def test_a_damaged_checkpoint_is_not_exported(checkpoint, tmp_path):
    weights = checkpoint / "policy" / "__0_0.distcp"
    weights.write_bytes(b"weights")
    write_manifest(checkpoint, {})
    weights.write_bytes(b"weighty")
    with pytest.raises(DamagedCheckpointError, match=r"step_10 is damaged: policy/__0_0\.distcp has changed"):
        export_checkpoint(checkpoint, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
