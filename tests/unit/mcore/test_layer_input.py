"""Tests full recomputation from layer inputs in host memory, with and without kept attention, and with late copies."""

import gc
import weakref
from typing import Any

import pytest
import torch
from support import tiny
from support.late_copies import assert_empty
from support.phases import assert_ends, checksums
from support.tiny import TINY_QWEN3, batch_of_lengths, offloading_activations, packed_rows, random_batch, tiny_policy
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.patches import layer_input
from tests.unit.mcore.test_activations import plain_steps, steps

pytestmark = pytest.mark.usefixtures("late")

FULL = {"activation_checkpointing": True, "recompute_granularity": "full", "recompute_method": "uniform"}
INPUT, BOTH = ["layer_input"], ["layer_input", "core_attn"]


def worker_of(make_worker: Any, modules: list[str], num_layers: int, **megatron: Any) -> Any:
    again = FULL | {"recompute_num_layers": num_layers}
    return make_worker(offloading_activations(tiny_policy(**megatron), modules, **again))


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
CASES = [
    *((TINY_QWEN3, modules, num_layers, {}) for modules, num_layers in ((INPUT, 1), (INPUT, 3), (BOTH, 1))),
    (TINY_QWEN3, BOTH, 2, {"activation_offload_fraction": 0.5}),
    (TINY_QWEN3, BOTH, 1, DROPOUT),
    (TINY_QWEN3, BOTH, 2, {"mlp_tile_tokens": 7}),
    (tiny.TINY_QWEN3_MOE, INPUT, 2, {"fine_grained_offloading_max_inflight_offloads": 0}),
    (tiny.TINY_QWEN3_MOE, BOTH, 1, {}),
]


@pytest.mark.parametrize(("config", "modules", "num_layers", "megatron"), CASES)
def test_numbers_are_those_of_plain_recomputation(make_worker, once, config, modules, num_layers, megatron):
    model = {name: value for name, value in megatron.items() if name.endswith(("dropout", "tile_tokens"))}
    want = plain_steps(make_worker, once, config, **FULL, recompute_num_layers=1, **model)
    again = FULL | {"recompute_num_layers": num_layers}
    worker = make_worker(offloading_activations(tiny_policy(config), modules, **again, **megatron))
    assert steps(worker) == want
    report = worker.activations.offloader.report
    assert set(report.modules) == set(modules)
    assert all(module.moved_bytes > 0 for module in report.modules.values())
    assert report.modules["layer_input"].freed_bytes == report.modules["layer_input"].moved_bytes
    assert_ends(worker)


@pytest.mark.parametrize("modules", [INPUT, BOTH], ids=str)
def test_packed_rows_of_long_and_short_samples(make_worker, modules):
    def reports(offload: bool) -> list[Any]:
        policy = tiny_policy(TINY_QWEN3, **FULL, recompute_num_layers=2)
        policy = offloading_activations(policy, modules) if offload else policy
        worker = make_worker(policy | {"max_total_sequence_length": 300, "sequence_packing": packed_rows(300)})
        lengths = [300, 2, 17, 120, 3, 64]
        steps = [worker.train(batch_of_lengths(lengths, seed=seed), NLLLoss(), gbs=6, mbs=2) for seed in range(2)]
        return [*steps, checksums(worker)]

    assert reports(offload=True) == reports(offload=False)


def test_of_a_layer_behind_only_the_gradient_is_there(make_worker, monkeypatch):
    worker = worker_of(make_worker, BOTH, 2)
    backward, behind = layer_input.KeptAttentionPass.backward, []

    def backward_of_attention(attention: Any, inputs: Any, gradient: torch.Tensor) -> Any:
        assert all(one.expired() for one in behind)
        gradients = backward(attention, inputs, gradient)
        behind.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (*inputs, *gradients))
        return gradients

    monkeypatch.setattr(layer_input.KeptAttentionPass, "backward", backward_of_attention)
    worker.train(random_batch(4, 12), NLLLoss(), gbs=4, mbs=2)
    assert len(behind) == 2 * TINY_QWEN3["num_hidden_layers"] * 6


def test_an_input_that_a_pipeline_holds_is_not_moved(make_worker):
    worker = worker_of(make_worker, INPUT, 1)
    held = []

    def receive(_: Any, __: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        held.append(hidden_states.detach().requires_grad_())
        return held[-1]

    worker.state.model[0].module.embedding.register_forward_hook(receive)
    for _ in range(2):
        worker.train(batch_of_lengths([12] * 4), NLLLoss(), gbs=4, mbs=2)
    report = worker.activations.offloader.report.modules["layer_input"]
    assert report.moved_bytes == report.freed_bytes == 2 * (2 * held[0].nbytes)  # not the first, and not the last one
    assert all(one.grad is not None for one in held)


class OtherAttention(torch.nn.Module):
    """Attention without a module `core_attention`, as linear attention is."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attention(*args, **kwargs)


def test_attention_that_cannot_be_kept_is_recomputed(make_worker):
    def run(policy: dict[str, Any]) -> list[Any]:
        worker = make_worker(policy)
        for layer in worker.state.model[0].module.decoder.layers[1:3]:
            layer.self_attention = OtherAttention(layer.self_attention)
        report = worker.train(random_batch(4, 12), NLLLoss(), gbs=4, mbs=2)
        return [report, checksums(worker)]

    got = run(offloading_activations(tiny_policy(TINY_QWEN3), BOTH, **FULL, recompute_num_layers=1))
    assert got == run(tiny_policy(TINY_QWEN3))


def test_a_failed_backward_pass_leaves_nothing_behind(make_worker, monkeypatch):
    worker = worker_of(make_worker, BOTH, 2)
    offloader = worker.activations.offloader
    batch = random_batch(4, 12)
    worker.train(batch, NLLLoss(), gbs=4, mbs=2)
    segments = []

    def fail_at_the_second(segment: Any, gradient: torch.Tensor) -> torch.Tensor:
        segments.append(segment)
        if len(segments) == 2:
            raise RuntimeError("out of memory")
        return backward(segment, gradient)

    backward = layer_input.SegmentPass.backward
    with monkeypatch.context() as patch:
        patch.setattr(layer_input.SegmentPass, "backward", fail_at_the_second)
        with pytest.raises(RuntimeError, match="out of memory"):
            worker.train(batch, NLLLoss(), gbs=4, mbs=2)
    alive = [weakref.ref(segment) for segment in segments]
    segments.clear()
    gc.collect()
    assert [one() for one in alive] == [None, None]  # neither do attention's graphs keep them
    worker.train(batch, NLLLoss(), gbs=4, mbs=2)
    assert_empty(offloader.host_pool)
