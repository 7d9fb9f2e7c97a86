"""Tests the export of a checkpoint whose recipe has settings that only several ranks can have."""

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.tiny import TINY_QWEN3_MOE, tiny_policy

from nemo_offload_rl.storage.manifest import write_manifest
from nemo_offload_rl.worker.export import export_checkpoint

LAYOUT = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tL", "sequence_parallel": True}
FLEX = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}


@pytest.mark.parametrize("settings", [LAYOUT, FLEX], ids=["layout", "flex"])
def test_a_checkpoint_is_exported_whatever_its_recipe_divides_over_ranks(make_worker, tmp_path, settings):
    policy = tiny_policy(TINY_QWEN3_MOE)
    worker, step = make_worker(policy), tmp_path / "step_1"
    worker.export_hf(str(tmp_path / "wanted"))
    worker.save_checkpoint(str(step / "policy"), save_optimizer=False)  # of one rank, which has the same tensors
    worker.shutdown()
    (step / "tokenizer").mkdir()
    megatron_cfg = policy["megatron_cfg"] | settings
    recipe = {"policy": policy | {"megatron_cfg": megatron_cfg}, "logger": {"monitor_gpus": False}}
    (step / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    write_manifest(step, {})
    export_checkpoint(step, tmp_path / "found")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("found", "wanted"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
