"""Tests that MLPs computed in tiles have the outputs and gradients of whole ones, and save their input alone.

test_two_ranks has the parallel layouts.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, packed_rows, random_batch, tiny_policy, with_plain_sgd
from support.tiny_megatron import one_rank

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.config.megatron import tokens_of_tile
from nemo_offload_rl.mcore.model.tiled_mlp import tile_mlps

LENGTH, HIDDEN, FFN = 24, 16, 48
GATED = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
BIASED = {"gated_linear_unit": False, "activation_func": F.gelu, "add_bias_linear": True}


@pytest.fixture
def rank():
    with one_rank():
        model_parallel_cuda_manual_seed(0)
        yield


def layer_of(tile_tokens: int | None, dtype: torch.dtype = torch.float32, **fields: Any) -> TransformerLayer:
    """Returns a layer, of which only the MLP is used; the same weights whatever the tile."""
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=2, use_cpu_initialization=True,
        params_dtype=dtype, bf16=dtype == torch.bfloat16, **GATED | fields,
    )  # fmt: skip
    layer: TransformerLayer = build_module(get_gpt_layer_local_spec(), config=config)
    layer.mlp.requires_grad_()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.mlp.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    tile_mlps([layer], tile_tokens)
    return layer


def inputs(rows: int, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    both = torch.randn(2, length, rows, HIDDEN, generator=generator).to(dtype)
    return both[0].requires_grad_(), both[1]


def run(layer: Any, hidden: torch.Tensor, grad: torch.Tensor, *, again: bool = False) -> dict[str, torch.Tensor]:
    """Returns an MLP's output, with its bias, and all gradients; `again` recomputes it in the backward pass."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        output, bias = layer.mlp(hidden, padding_mask=None)
        return output if bias is None else output + bias

    output = checkpoint(forward, False, hidden) if again else forward(hidden)
    output.backward(grad)
    gradients = {name: parameter.grad for name, parameter in layer.mlp.named_parameters()}
    return {"output": output.detach(), "hidden": hidden.grad, **gradients}


CASES = [(1, 1, False), (1, 7, False), (1, 8, True), (2, 10, False), (2, 7, True), (1, 24, False), (2, 1000, False)]


@pytest.mark.parametrize("kind", [GATED, BIASED], ids=["gated", "biases"])
@pytest.mark.parametrize(("rows", "tile_tokens", "again"), CASES)
def test_tiles_compute_what_the_whole_does(rank, kind, rows, tile_tokens, again):
    want = run(layer_of(None, **kind), *inputs(rows))
    got = run(layer_of(tile_tokens, **kind), *inputs(rows), again=again)
    assert got.keys() == want.keys()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    if tile_tokens == 1000:
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_names_of_parameters_and_what_they_are_stay(rank):
    plain, tiled = layer_of(None), layer_of(8)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in tiled.named_parameters()]
    assert plain.mlp.sharded_state_dict().keys() == tiled.mlp.sharded_state_dict().keys()


@pytest.mark.parametrize(("rows", "tiles"), [(1, [7, 7, 7, 3]), (2, [3] * 8), (9, [1] * 24)])
def test_only_the_input_is_saved_and_no_tile_is_larger_than_asked(rank, rows, tiles):
    """These bytes are what the plan counts (`plan.training_memory`)."""
    layer, (hidden, grad) = layer_of(7), inputs(rows)
    saved, lengths = [], []
    layer.mlp.linear_fc1.register_forward_pre_hook(lambda _, args: lengths.append(len(args[0])))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, _ = layer.mlp(hidden)
    assert saved == [hidden.nbytes]
    output.backward(grad)
    assert lengths == tiles * 2
    with torch.no_grad():
        assert not layer.mlp(hidden)[0].requires_grad
    assert lengths == tiles * 3


def test_the_ranks_of_a_sequence_parallel_group_share_a_tile(rank):
    layer = layer_of(None)
    layer.mlp.config.sequence_parallel, layer.mlp.tp_group = True, SimpleNamespace(size=lambda: 2)
    tile_mlps([layer], 8)
    assert [len(tile) for tile in layer.mlp.forward.tiles(inputs(1)[0])] == [4] * 6


@pytest.mark.parametrize("again", [False, True])
def test_a_gradient_arrives_once_a_call_after_the_last_tile(rank, again):
    layer, seen, tiles = layer_of(5), [], []
    for name, parameter in layer.mlp.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: seen.append((name, len(tiles))))
    layer.mlp.linear_fc1.register_full_backward_hook(lambda *_: tiles.append(0))
    run(layer, *inputs(1), again=again)
    assert sorted(seen) == [("linear_fc1.weight", 5), ("linear_fc2.weight", 5)]


def test_frozen_weights_get_no_gradient(rank):
    found = []
    for tile_tokens in (None, 5):
        layer = layer_of(tile_tokens)
        layer.mlp.linear_fc1.requires_grad_(False)
        found.append(run(layer, *inputs(1)))
        assert found[-1].pop("linear_fc1.weight") is None
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-5)


def test_sums_over_tiles_are_as_precise_as_one_product(rank):
    """One product rounds to bfloat16 once; a sum of 256 bfloat16 gradients in bfloat16 would be 10 times as far off."""
    exact = run(layer_of(None), *inputs(1, 256))["linear_fc2.weight"]
    errors = []
    for tile_tokens in (None, 1):
        layer = layer_of(tile_tokens, torch.bfloat16).bfloat16()
        got = run(layer, *inputs(1, 256, torch.bfloat16))["linear_fc2.weight"]
        assert got.dtype == torch.bfloat16
        errors.append(float((got.float() - exact).norm()))
    assert errors[1] < 1.5 * errors[0]


def test_a_kernel_that_adds_to_main_grad_does_so_once_a_tile(rank, monkeypatch):
    """Replaces the kernel, which needs a GPU; megatron-core's own code calls it."""
    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=lambda tokens, grad, main: main.add_(grad.t() @ tokens))
    monkeypatch.setattr(linear_layers, "fused_weight_gradient_mlp_cuda", kernel, raising=False)
    want, layer = run(layer_of(None), *inputs(1)), layer_of(5)
    for name in ("linear_fc1", "linear_fc2"):
        linear = getattr(layer.mlp, name)
        linear.gradient_accumulation_fusion = True
        linear.weight.main_grad = torch.zeros_like(linear.weight)
        linear.weight.grad_added_to_main_grad = False
    run(layer, *inputs(1))
    run(layer, *inputs(1))
    for name in ("linear_fc1", "linear_fc2"):
        weight = getattr(layer.mlp, name).weight
        assert weight.grad_added_to_main_grad
        torch.testing.assert_close(weight.main_grad, 2 * want[f"{name}.weight"], rtol=1e-6, atol=1e-5)


def numbers(worker: Any) -> dict[str, Any]:
    steps = [worker.train(random_batch(8, seed=seed), NLLLoss(), gbs=8, mbs=2) for seed in range(2)]
    return {
        "steps": torch.tensor([(step["loss"], step["grad_norm"]) for step in steps]),
        "logprobs": worker.get_logprobs(random_batch(4, seed=9), mbs=2)["logprobs"],
        "evaluated": worker.evaluate(random_batch(4, seed=9), NLLLoss(), mbs=2)["loss"],
        "weights": {name: weight.clone() for name, weight in worker.hf_weights()},
    }


BIASED_LLAMA = TINY_QWEN3 | {"model_type": "llama", "mlp_bias": True}
FULL = {"activation_checkpointing": True}


@pytest.mark.parametrize("kind", ["padded", "packed, recomputed", "packed, biases", "padded, biases, recomputed"])
def test_training_changes_no_number(make_worker, kind):
    config, megatron = BIASED_LLAMA if "biases" in kind else TINY_QWEN3, FULL if "recomputed" in kind else {}
    found = []
    for tile_tokens in (None, 7):
        policy = with_plain_sgd(tiny_policy(config, **megatron, mlp_tile_tokens=tile_tokens), rate=0.1)
        if "packed" in kind:
            policy["sequence_packing"] = packed_rows(32)
        found.append(numbers(make_worker(policy)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_experts_and_other_mlps_are_refused_by_name(make_worker):
    with pytest.raises(ValueError, match="mlp_tile_tokens is 8, but the model has layers with experts"):
        make_worker(tiny_policy(TINY_QWEN3_MOE, mlp_tile_tokens=8))
    make_worker(tiny_policy(TINY_QWEN3_MOE))
    layer = layer_of(None)
    layer.mlp = torch.nn.Identity()
    with pytest.raises(ValueError, match="mlp_tile_tokens is set, but layer 1 has a Identity, and only"):
        tile_mlps([layer], 8)


def test_the_tile_of_auto():
    found = [tokens_of_tile(*of) for of in (("auto", 1536), ("auto", 18_432), (5, 1536), (None, 1536))]
    assert found == [16_384, 18_432, 5, None]
