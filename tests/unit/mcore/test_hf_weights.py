"""Tests weights in files and exports: names, cached mappings, overrides of a config, and what transformers computes."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, logprobs_in_transformers, random_batch, tiny_policy
from support.toy_policy import LocalTransport

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.mcore import weights
from nemo_offload_rl.mcore.model.bridge_import import auto_bridge
from nemo_offload_rl.mcore.patches import bridge
from nemo_offload_rl.mcore.random_weights import as_in_files
from nemo_offload_rl.model_check.compare import UnbuildableError, check_is_built_of, compare
from nemo_offload_rl.refit.plan import TensorSpec
from nemo_offload_rl.storage.manifest import write_manifest
from nemo_offload_rl.worker.export import export_checkpoint

QWEN2 = TINY_QWEN3 | {"model_type": "qwen2"}


@pytest.fixture
def originals():
    auto_bridge()
    bridge.make_exports_fast()
    from megatron.bridge.models.conversion import param_mapping

    names = ("split_qkv_weights", "split_qkv_biases")
    return {name: getattr(param_mapping, name).args[0] for name in names}


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (4, 1)])
def test_query_key_and_value_are_split_as_megatron_bridge_does(originals, heads, groups, gate):
    sizes = {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": 3, "hidden_size": 5}
    config = SimpleNamespace(**sizes, attention_output_gate=gate)
    rows = 3 * (heads * (2 if gate else 1) + groups * 2)
    weight, bias = torch.randn(rows, 5), torch.randn(rows)
    for kind, *arguments in (("weights", weight), ("weights", weight, 5), ("biases", bias)):
        ours, original = getattr(bridge, f"split_{kind}"), originals[f"split_qkv_{kind}"]
        found, expected = ours(original, config, *arguments), original(config, *arguments)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("hf_config", [TINY_QWEN3, QWEN2, QWEN2 | {"tie_word_embeddings": False}])
def test_every_export_is_that_of_a_bridge_that_keeps_nothing(make_worker, hf_config):
    worker = make_worker(tiny_policy(hf_config))
    for _ in range(2):
        expected = list(worker.state.bridge.export_hf_weights(worker.state.model, show_progress=False))
        found = list(worker.hf_weights())
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, expected, strict=True))
        worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=4)


def test_a_tied_output_layer_is_the_embedding_and_takes_no_memory(make_worker):
    worker = make_worker(tiny_policy(QWEN2 | {"tie_word_embeddings": True}))
    found = dict(worker.hf_weights())
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()


def test_all_that_an_export_reads_is_known(make_worker):
    weights = make_worker().hf_weights
    reader = weights.__self__._hf_weights
    names = [name for name, _ in weights()]
    before = reader.tensors()
    storages = {tensor.untyped_storage().data_ptr() for tensor in before}
    copied = {name for name, tensor in weights() if tensor.untyped_storage().data_ptr() not in storages}
    assert copied == {name for name in names if any(f".{part}_proj." in name for part in "qkv")}
    assert all(one is other for one, other in zip(before, reader.tensors(), strict=True))
    assert reader.collectives() == ""


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


def of_folder(folder, **keys):
    return tiny_policy() | {"hf_config": None, "model_name": str(folder)} | keys


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
    data, worker = random_batch(4), make_worker(of_folder(folder, hf_config_overrides=overrides))
    found = worker.get_logprobs(data, mbs=4)["logprobs"]
    told = overrides if in_transformers is None else in_transformers
    wanted = logprobs_in_transformers(folder, data, **told)
    without = logprobs_in_transformers(folder, data)
    worker.export_hf(str(tmp_path / "exported"))
    exported = logprobs_in_transformers(tmp_path / "exported", data)
    real = torch.arange(1, data["input_ids"].shape[1])[None] < data["input_lengths"][:, None]
    torch.testing.assert_close(found[:, 1:][real], wanted[real], rtol=0, atol=1e-4)
    torch.testing.assert_close(exported[real], wanted[real], rtol=0, atol=1e-4)
    assert (wanted - without)[real].abs().max() > 0.05  # the override matters
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert {key: written[key] for key in told} == told
    for key, tensor in worker.hf_weights():
        assert key == "lm_head.weight" or torch.equal(tensor, weights[key])


@pytest.mark.parametrize(("overrides", "field"), [({"rope_theta": 50.0}, "rotary_base"), (YARN_ON, "softmax_scale")])
def test_the_check_compares_the_model_that_the_worker_builds(saved, overrides, field):
    folder, _ = saved(TINY_QWEN3)
    policy = of_folder(folder, hf_config_overrides=overrides)
    assert all(difference.is_rounding for difference in compare(policy))
    bridge_without_them = auto_bridge().from_hf_pretrained(folder)
    with pytest.raises(UnbuildableError, match=rf"another model than its Hugging Face config .*{field} "):
        check_is_built_of(hf_config(policy), bridge_without_them)


UNTIED = TINY_QWEN3 | {"tie_word_embeddings": False}


def folder_without(weight, config, folder):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(hf_config(tiny_policy(config))).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    if weight is not None:
        del weights[weight]
    save_file(weights, file, metadata={"format": "pt"})
    return of_folder(folder)


MISSING = [(TINY_QWEN3, f"model.layers.{part}.weight") for part in ("1.self_attn.q_proj", "3.self_attn.q_norm")]
MISSING += [(TINY_QWEN3_MOE, "model.layers.1.mlp.experts.2.up_proj.weight"), (UNTIED, "lm_head.weight")]


@pytest.mark.parametrize(("config", "weight"), MISSING)
def test_a_missing_weight_is_named(make_worker, tmp_path, config, weight):
    policy = folder_without(weight, config, tmp_path)
    with pytest.raises(ValueError, match=rf"^policy\.model_name '{tmp_path}' lacks 1 weights .*such as '{weight}'"):
        make_worker(policy)


def test_a_weight_without_a_name_is_said(make_worker):
    """In Qwen3's files, the biases by which routers choose have no names."""
    routers = {"enable_expert_bias": True, "score_function": "sigmoid", "dtype": "fp32"}
    policy = tiny_policy(TINY_QWEN3_MOE, **{f"moe_router_{name}": value for name, value in routers.items()})
    with pytest.raises(ValueError, match=r"has no names for 4 weights .*layers\.0\.mlp\.router\.expert_bias'"):
        make_worker(policy)


def changed(folder, **weights):
    file = folder / "model.safetensors"
    save_file(load_file(file) | weights, file, metadata={"format": "pt"})


def test_an_output_layer_of_its_own_is_refused_in_a_model_that_ties_it(make_worker, tmp_path):
    """transformers does not tie such a model, and Megatron would."""
    policy = folder_without(None, TINY_QWEN3, tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    changed(tmp_path, **{"lm_head.weight": embedding.clone()})
    before = make_worker(policy).get_logprobs(random_batch(2), mbs=2)["logprobs"]
    changed(tmp_path, **{"lm_head.weight": 2 * embedding})
    with pytest.raises(ValueError, match=r"has different weights 'lm_head\.weight' and 'model\.embed_tokens\.weight'"):
        make_worker(policy)
    untied = make_worker(policy | {"hf_config_overrides": {"tie_word_embeddings": False}})
    found = assert_is_exported(untied, tmp_path, 2)
    assert (found - before).abs().max() > 1e-3


def test_an_output_layer_of_its_own_is_refused_in_a_family_that_always_ties_it(
    make_worker, tmp_path, caplog, monkeypatch
):
    for kind in ("FLASH", "FUSED", "UNFUSED"):  # Megatron sets them for gemma, and refuses those of another model
        monkeypatch.setenv(f"NVTE_{kind}_ATTN", "1")
        monkeypatch.delenv(f"NVTE_{kind}_ATTN")
    gemma = TINY_QWEN3 | {"model_type": "gemma"}
    caplog.set_level(logging.WARNING)
    make_worker(tiny_policy(gemma))  # whose weights in memory have the embedding by both names
    assert not caplog.records
    policy = folder_without(None, gemma, tmp_path)
    changed(tmp_path, **{"lm_head.weight": torch.ones(14, 64)})
    with pytest.raises(ValueError, match=r"lm_head\.weight.* another family"):
        make_worker(policy)


@pytest.mark.parametrize("config", [TINY_QWEN3, UNTIED])
def test_an_embedding_with_other_rows_than_the_vocabulary_is_refused(make_worker, tmp_path, config):
    policy = folder_without(None, config, tmp_path)
    with pytest.raises(ValueError, match=r"has 14 rows in 'model\.embed_tokens\.weight', but .* vocab_size 12;"):
        make_worker(policy | {"hf_config_overrides": {"vocab_size": 12}})
    make_worker(policy)


def test_weights_that_no_parameter_takes_are_named(make_worker, tmp_path, caplog):
    policy = folder_without(None, TINY_QWEN3_MOE, tmp_path)
    caplog.set_level(logging.WARNING)  # whatever level earlier tests have left
    make_worker(policy)
    assert not caplog.records
    changed(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    make_worker(policy)
    assert not caplog.records  # transformers computes it, and ignores it in files
    changed(tmp_path, **{"value_head.weight": torch.ones(1, 64)})
    make_worker(policy | {"hf_config_overrides": {"num_hidden_layers": 3}})
    (record,) = caplog.records
    left_out = 2 + 6 + 1 + 3 * 4  # of a layer: norms, weights of attention, router, experts
    assert f"has {left_out + 1} weights that a model of its config (model_type qwen3_moe) does not" in record.message
    assert "'model.layers.3.input_layernorm.weight'" in record.message


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "SCB"])
def test_quantised_weights_are_refused(make_worker, tmp_path, scale):
    policy, layer = folder_without(None, TINY_QWEN3, tmp_path), "model.layers.1.mlp.up_proj"
    quantised = torch.ones(128, 64, dtype=torch.int8 if scale == "SCB" else torch.float8_e4m3fn)
    changed(tmp_path, **{f"{layer}.weight": quantised, f"{layer}.{scale}": torch.ones(1)})
    with pytest.raises(ValueError, match=rf" 1 .*{layer}\.weight"):
        make_worker(policy)


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
    again = make_worker(of_folder(tmp_path / "hf"))
    assert torch.equal(again.get_logprobs(random_batch(4), mbs=4)["logprobs"], want)


FORMER_NAMES = {
    "base alone": ({"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": None}),
    "yarn": (
        {"rope_parameters": YARN},
        {"rope_theta": 1e4, "rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"}},
    ),
}


@pytest.mark.parametrize("name", FORMER_NAMES)
@pytest.mark.parametrize("family", [TINY_QWEN3, TINY_QWEN3_MOE])
def test_an_export_says_to_transformers_4_what_it_says_to_5(make_worker, tmp_path, family, name):
    fields, wanted = FORMER_NAMES[name]
    worker = make_worker(tiny_policy(family | fields))
    worker.export_hf(str(tmp_path / "hf"))
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {key: written.get(key, "absent") for key in wanted} == wanted
    assert written.get("num_experts") == family.get("num_experts")
    read = hf_config(of_folder(tmp_path / "hf"))
    assert read.rope_parameters == worker.state.bridge.hf_pretrained.rope_parameters
    assert_is_exported(worker, tmp_path / "hf")


def test_exports_and_checkpoints_have_the_models_own_ends_and_sampling_settings(make_worker, tmp_path):
    make_worker().export_hf(str(tmp_path / "random"))
    assert not (tmp_path / "random" / "generation_config.json").exists()  # config.json has all that it has
    # transformers would not write these settings, of which one contradicts another.
    settings = {"eos_token_id": [12, 3], "do_sample": False, "temperature": 0.6, "top_k": 20}
    (tmp_path / "random" / "generation_config.json").write_text(json.dumps(settings))
    worker = make_worker(of_folder(tmp_path / "random"))
    (tmp_path / "random" / "generation_config.json").unlink()  # a warm start deletes the folder when it has been read
    worker.export_hf(str(tmp_path / "hf"))
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=False)
    for folder in (tmp_path / "hf", tmp_path / "policy" / "hf_config"):
        assert json.loads((folder / "generation_config.json").read_text()) == settings
    make_worker().export_hf(str(tmp_path / "hf"))
    assert not (tmp_path / "hf" / "generation_config.json").exists()


class Loaded:
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
    assert any("lm_head.weight" in load_file(shard) for shard in shards)
    assert_is_exported(worker, tmp_path / "hf", 2)


PIPELINE = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tL", "sequence_parallel": True}
FLEX = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}


@pytest.mark.parametrize("settings", [PIPELINE, FLEX], ids=["layout", "flex"])
def test_a_checkpoint_is_exported_whatever_its_recipe_divides_over_ranks(make_worker, tmp_path, settings):
    policy, step = tiny_policy(TINY_QWEN3_MOE), tmp_path / "step_1"
    worker = make_worker(policy)
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
