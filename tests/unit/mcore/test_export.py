import json

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, logprobs_in_transformers, random_batch, tiny_policy
from support.toy_policy import LocalTransport

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore import weights
from nemo_offload_rl.refit.plan import TensorSpec
from nemo_offload_rl.storage.manifest import write_manifest
from nemo_offload_rl.worker.export import export_checkpoint


def assert_is_exported(worker, folder, rows=4):
    """Checks that transformers computes the worker's log-probs from an export; returns these."""
    data = random_batch(rows)
    want = worker.get_logprobs(data, mbs=rows)["logprobs"]
    got = logprobs_in_transformers(folder, data)
    for row, length in enumerate(data["input_lengths"].tolist()):
        torch.testing.assert_close(got[row, : length - 1], want[row, 1:length], rtol=0, atol=1e-4)
    return want


def test_an_export_loads_in_transformers_and_replaces_an_older_one(make_worker, tmp_path):
    worker = make_worker()
    worker.export_hf(str(tmp_path / "hf"))
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=4)
    worker.export_hf(str(tmp_path / "hf"))
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert not list(tmp_path.glob("*.partial"))
    want = assert_is_exported(worker, tmp_path / "hf")
    again = make_worker(tiny_policy() | {"hf_config": None, "model_name": str(tmp_path / "hf")})
    assert torch.equal(again.get_logprobs(random_batch(4), mbs=4)["logprobs"], want)


def test_exports_and_checkpoints_have_the_models_own_ends_and_sampling_settings(make_worker, tmp_path):
    make_worker().export_hf(str(tmp_path / "random"))
    assert not (tmp_path / "random" / "generation_config.json").exists()  # config.json has all that it has
    # transformers would not write these settings, of which one contradicts another.
    settings = {"eos_token_id": [12, 3], "do_sample": False, "temperature": 0.6, "top_k": 20}
    (tmp_path / "random" / "generation_config.json").write_text(json.dumps(settings))
    worker = make_worker(tiny_policy() | {"hf_config": None, "model_name": str(tmp_path / "random")})
    (tmp_path / "random" / "generation_config.json").unlink()  # a warm start deletes the folder when it has been read
    worker.export_hf(str(tmp_path / "hf"))
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=False)
    for folder in (tmp_path / "hf", tmp_path / "policy" / "hf_config"):
        assert json.loads((folder / "generation_config.json").read_text()) == settings
    make_worker().export_hf(str(tmp_path / "hf"))
    assert not (tmp_path / "hf" / "generation_config.json").exists()


class Loaded:
    """Receives weights and keeps them."""

    def load_weights(self, named_tensors) -> None:
        self.weights = {name: tensor.clone() for name, tensor in named_tensors}


def test_a_refit_sends_what_was_planned_before_the_first_one(make_worker):
    worker, engine = make_worker(), Loaded()
    plan = worker.prepare_refit_info(LocalTransport([engine]))
    norms = []
    for _ in range(2):
        checksums = worker.send_weights()
        assert [TensorSpec.of(name, tensor) for name, tensor in engine.weights.items()] == list(plan.tensors)
        assert len(checksums) == len(plan.tensors) > 10
        norms.append(engine.weights["model.norm.weight"])
        worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=4)
    assert not torch.equal(*norms)


def test_untied_embeddings_in_several_shards(make_worker, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARD_BYTES", 50_000)
    worker = make_worker(tiny_policy(TINY_QWEN3 | {"tie_word_embeddings": False}))
    worker.export_hf(str(tmp_path / "hf"))
    shards = sorted(tmp_path.glob("hf/model-*.safetensors"))
    assert len(shards) > 1
    names = set()
    for shard in shards:
        with safe_open(shard, "pt") as file:
            names |= set(file.keys())
    assert "lm_head.weight" in names
    assert_is_exported(worker, tmp_path / "hf", 2)


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
