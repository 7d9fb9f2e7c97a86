"""Tests that exports with cached mappings equal those of Megatron-Bridge, bit for bit."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from support.tiny import TINY_QWEN3, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.model.bridge_import import auto_bridge
from nemo_offload_rl.mcore.patches import bridge

QWEN2 = TINY_QWEN3 | {"model_type": "qwen2"}


@pytest.fixture
def originals():
    """Returns Megatron-Bridge's functions, by name."""
    auto_bridge()
    bridge.make_exports_fast()
    from megatron.bridge.models.conversion import param_mapping

    names = ("split_qkv_weights", "split_qkv_biases", "remove_non_pickleables")
    return {name: getattr(param_mapping, name).args[0] for name in names}


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (4, 1)])
def test_query_key_and_value_are_split_as_megatron_bridge_does(originals, heads, groups, gate):
    config = SimpleNamespace(
        num_attention_heads=heads, num_query_groups=groups, kv_channels=3, hidden_size=5, attention_output_gate=gate
    )
    rows = 3 * (heads * (2 if gate else 1) + groups * 2)
    for ours, original, *arguments in (
        (bridge.split_weights, originals["split_qkv_weights"], torch.randn(rows, 5)),
        (bridge.split_weights, originals["split_qkv_weights"], torch.randn(rows, 5), 5),
        (bridge.split_biases, originals["split_qkv_biases"], torch.randn(rows)),
    ):
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


def test_a_config_is_stripped_once_and_forgotten_with_its_model(originals):
    class Config:
        pass

    config, strip = Config(), functools.partial(bridge.strip_once, originals["remove_non_pickleables"])
    config.loss, config.width = (lambda: None), 5
    before = len(bridge._stripped)
    stripped = strip(config)
    assert (stripped.loss, stripped.width) == (None, 5)
    assert strip(config) is stripped
    assert strip(copy.copy(config)) is not stripped
    del config
    assert len(bridge._stripped) == before


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
