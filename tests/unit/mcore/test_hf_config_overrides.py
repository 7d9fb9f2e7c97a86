"""Tests that a model of a folder is trained, exported and checked with `policy.hf_config_overrides`."""

import json

import pytest
import torch
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, logprobs_in_transformers, random_batch, tiny_policy

from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.mcore.model.bridge_import import auto_bridge
from nemo_offload_rl.mcore.random_weights import as_in_files
from nemo_offload_rl.model_check.compare import UnbuildableError, check_is_built_of, compare

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
YARN_ON = {"rope_parameters": YARN}
WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2}
BASE = {"rope_type": "default", "rope_theta": 50.0}
MISTRAL = TINY_QWEN3 | {"model_type": "mistral", "sliding_window": None}
# The family, the overrides, and what transformers is told in its place; None for the same.
OVERRIDES = {
    "base of rope": (TINY_QWEN3, {"rope_theta": 50.0}, {"rope_parameters": BASE}),
    "yarn": (TINY_QWEN3, YARN_ON, None),
    "norms": (TINY_QWEN3, {"rms_norm_eps": 0.5}, None),
    "activation": (TINY_QWEN3, {"hidden_act": "gelu"}, None),
    "windows": (TINY_QWEN3, WINDOWS | {"use_sliding_window": True}, WINDOWS),
    "window of all layers": (MISTRAL, {"sliding_window": 3}, None),
    "fewer layers": (TINY_QWEN3, {"num_hidden_layers": 2}, {"num_hidden_layers": 2}),
    "experts of a token": (TINY_QWEN3_MOE, {"num_experts_per_tok": 1, "norm_topk_prob": False}, None),
}


@pytest.fixture
def saved(tmp_path):
    """Saves a model with large weights, so that each flag matters; returns its folder and its weights by name."""
    from transformers import AutoModelForCausalLM

    def save(config):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(hf_config(tiny_policy(config)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1.5 / parameter.shape[-1] ** 0.5)
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model", as_in_files(model, model.state_dict())

    return save


@pytest.mark.parametrize("name", OVERRIDES)
def test_the_worker_and_its_exports_are_the_model_with_its_overrides(make_worker, saved, tmp_path, name):
    config, overrides, in_transformers = OVERRIDES[name]
    folder, weights = saved(config)
    policy = tiny_policy() | {"hf_config": None, "model_name": str(folder), "hf_config_overrides": overrides}
    data = random_batch(4)
    worker = make_worker(policy)
    found = worker.get_logprobs(data, mbs=4)["logprobs"]
    wanted = logprobs_in_transformers(folder, data, **(overrides if in_transformers is None else in_transformers))
    without = logprobs_in_transformers(folder, data)
    worker.export_hf(str(tmp_path / "exported"))
    exported = logprobs_in_transformers(tmp_path / "exported", data)
    real = torch.arange(1, data["input_ids"].shape[1])[None] < data["input_lengths"][:, None]
    torch.testing.assert_close(found[:, 1:][real], wanted[real], rtol=0, atol=1e-4)
    torch.testing.assert_close(exported[real], wanted[real], rtol=0, atol=1e-4)
    assert (wanted - without)[real].abs().max() > 0.05  # the override matters
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    for key, value in (overrides if in_transformers is None else in_transformers).items():
        assert written[key] == value
    for key, tensor in worker.hf_weights():
        assert key == "lm_head.weight" or torch.equal(tensor, weights[key])


@pytest.mark.parametrize(("overrides", "field"), [({"rope_theta": 50.0}, "rotary_base"), (YARN_ON, "softmax_scale")])
def test_the_check_compares_the_model_that_the_worker_builds(saved, overrides, field):
    folder, _ = saved(TINY_QWEN3)
    policy = tiny_policy() | {"hf_config": None, "model_name": str(folder), "hf_config_overrides": overrides}
    assert all(difference.is_rounding for difference in compare(policy))
    bridge_without_them = auto_bridge().from_hf_pretrained(folder)
    with pytest.raises(UnbuildableError, match=rf"another model than its Hugging Face config .*{field} "):
        check_is_built_of(hf_config(policy), bridge_without_them)
