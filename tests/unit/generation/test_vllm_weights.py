"""Tests a checkpoint's weights in parameters laid out as vLLM's models do."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_offload_rl.generation import vllm_memory, vllm_weights
from nemo_offload_rl.generation.vllm_memory import engine_memory_stats
from nemo_offload_rl.generation.vllm_weights import (
    dropped_biases,
    find_experts_on_host,
    read_back,
    transformed_after_loading,
)
from nemo_offload_rl.refit.plan import TensorSpec

LAYER = "model.layers.0"
CHECKPOINT = {
    "model.embed_tokens.weight": torch.randn(30, 8), f"{LAYER}.self_attn.q_proj.weight": torch.randn(16, 8),
    f"{LAYER}.self_attn.k_proj.weight": torch.randn(4, 8), f"{LAYER}.self_attn.v_proj.weight": torch.randn(4, 8),
    f"{LAYER}.self_attn.q_proj.bias": torch.randn(16), f"{LAYER}.self_attn.k_proj.bias": torch.randn(4),
    f"{LAYER}.self_attn.v_proj.bias": torch.randn(4), f"{LAYER}.self_attn.o_proj.weight": torch.randn(8, 16),
    f"{LAYER}.mlp.gate_proj.weight": torch.randn(12, 8), f"{LAYER}.mlp.up_proj.weight": torch.randn(12, 8),
    "model.layers.1.mlp.gate.weight": torch.randn(2, 8), "model.norm.weight": torch.randn(8),
    **{
        f"model.layers.1.mlp.experts.{expert}.{part}.weight": torch.randn(*shape)
        for expert in range(2)
        for part, shape in {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}.items()
    },
}  # fmt: skip
SPECS = [TensorSpec.of(name, tensor) for name, tensor in CHECKPOINT.items()]


def fused() -> dict[str, torch.Tensor]:
    """Returns the checkpoint in vLLM's layout: fused qkv, gate and up, experts in two tensors, a vocabulary of 64."""
    own = {name: tensor for name, tensor in CHECKPOINT.items() if not any(f"{p}_proj." in name for p in "qkv")}
    parameters = {name: tensor for name, tensor in own.items() if ".experts." not in name and "gate_proj" not in name}
    parameters["model.embed_tokens.weight"] = torch.cat([CHECKPOINT["model.embed_tokens.weight"], torch.zeros(34, 8)])
    for kind in ("weight", "bias"):
        parts = [CHECKPOINT[f"{LAYER}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
        parameters[f"{LAYER}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
    gate, up = (CHECKPOINT[f"{LAYER}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    del parameters[f"{LAYER}.mlp.up_proj.weight"]
    parameters[f"{LAYER}.mlp.gate_up_proj.weight"] = torch.cat([gate, up])
    experts = [
        {part: CHECKPOINT[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")}
        for expert in range(2)
    ]
    gates_and_ups = [torch.cat([one["gate"], one["up"]]) for one in experts]
    parameters["model.layers.1.mlp.experts.w13_weight"] = torch.stack(gates_and_ups)
    parameters["model.layers.1.mlp.experts.w2_weight"] = torch.stack([one["down"] for one in experts])
    return parameters


@pytest.mark.parametrize("experts", [".experts.w", ".experts.routed_experts.w"])
def test_every_weight_is_read_back(experts):
    found = read_back({name.replace(".experts.w", experts): one for name, one in fused().items()}, SPECS)
    assert list(found) == list(CHECKPOINT)
    for name, tensor in CHECKPOINT.items():
        assert torch.equal(found[name], tensor), name


def test_loads_of_experts_are_told_by_their_parameters_names():
    names = {"mlp.experts.routed_experts.w13_weight", "mlp.experts.routed_experts.w2_weight", "mlp.gate.weight"}
    loaded = ["mlp.experts.w13_weight", "mlp.experts.w2_weight", "mlp.gate.weight"]
    assert vllm_weights.parameters_filled(loaded, names) == names
    before = {"mlp.experts.w13_weight"}  # a vLLM without that module
    assert vllm_weights.parameters_filled(["mlp.experts.w13_weight"], before) == before


def test_biases_of_layers_that_have_none_are_dropped():
    attention = f"{LAYER}.self_attn"
    biases = [f"{attention}.o_proj.bias", "model.layers.1.mlp.gate.bias", "vision.patch.bias"]
    sent = [*SPECS, *(TensorSpec(name, (8,), torch.float32) for name in biases)]
    assert dropped_biases(fused(), sent) == biases[:2]  # the model has no such layer as the last: its load refuses that
    without = {name: one for name, one in fused().items() if not name.endswith(".bias")}
    assert dropped_biases(without, SPECS) == [f"{attention}.{part}_proj.bias" for part in "qkv"]
    assert dropped_biases(fused() | dict.fromkeys(biases, torch.zeros(8)), sent) == []


def test_a_tied_output_layer_is_the_embedding():
    embedding = CHECKPOINT["model.embed_tokens.weight"]
    found = read_back(fused(), [*SPECS, TensorSpec.of("lm_head.weight", embedding)])
    assert torch.equal(found["lm_head.weight"], embedding)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.kv_a_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight"]
)
def test_what_cannot_be_found_cannot_be_compared(name):
    with pytest.raises(ValueError, match=rf"{name}' as .* has no such parameter, .* policy\.verify_refit to false"):
        read_back(fused(), [TensorSpec(name, (6, 8), torch.float32)])
    repacked = fused() | {"model.norm.weight": CHECKPOINT["model.norm.weight"].view(2, 4)}
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' as torch\.float32 \[8\], but vLLM's model has it as"):
        read_back(repacked, SPECS)


def test_a_tensor_among_discarded_weights_that_nothing_restores_is_found():
    weight, scale, elsewhere = torch.zeros(100), torch.ones(1), torch.ones(1)
    blocks = [(weight.data_ptr() - 64, 464), (scale.data_ptr(), 4)]
    if any(first <= elsewhere.data_ptr() < first + size for first, size in blocks):
        blocks[0] = (weight.data_ptr(), 400)
    with FakeTensorMode():
        fake = torch.zeros(1)
    lost = vllm_weights.outside_of_parameters([weight, weight[3:5], scale, elsewhere, fake], [weight], blocks)
    assert [id(tensor) for tensor in lost] == [id(scale)]


def module(kind, **attributes):
    """Returns a module whose class has the name of one of vLLM's."""
    made = type(kind, (torch.nn.Module,), {})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def method(kind, **attributes):
    """Returns an object that vLLM would assign to a module's `quant_method`."""
    return type(kind, (), {"process_weights_after_loading": lambda layer: None, **attributes})()


def experts(kernel):
    return method("UnquantizedFusedMoEMethod", unquantized_backend=SimpleNamespace(name=kernel))


def test_weights_that_vllm_leaves_as_they_are_may_be_refitted_and_those_that_it_changes_are_named():
    assert not transformed_after_loading(torch.nn.Sequential(torch.nn.Linear(2, 2)).named_modules())
    attention = type("CrossAttention", (type(module("Attention")),), {"process_weights_after_loading": print})()
    plain = {
        "qkv_proj": module("QKVParallelLinear", quant_method=method("UnquantizedLinearMethod")),
        "embed": module("VocabParallelEmbedding", quant_method=method("UnquantizedEmbeddingMethod")),
        "experts": module("RoutedExperts", quant_method=experts("TRITON")),
        "wrapped": module("RoutedExperts", quant_method=method("Modular", old_quant_method=experts("TRITON"))),
        "attn": attention,
    }
    assert transformed_after_loading(plain.items()) == []
    changed = {
        "qkv_proj": module("QKVParallelLinear", quant_method=method("Fp8LinearMethod")),
        "experts": module("RoutedExperts", quant_method=experts("FLASHINFER_CUTLASS")),
        "attn": module("MLAAttention", process_weights_after_loading=print),
    }
    assert transformed_after_loading(changed.items()) == [
        "qkv_proj changes its weights (Fp8LinearMethod)",
        "experts rearranges its experts for FLASHINFER_CUTLASS",
        "attn computes other tensors from its weights (MLAAttention)",
    ]
    as_module = module("UnquantizedFusedMoEMethod", unquantized_backend=SimpleNamespace(name="TRITON"))
    type(as_module).process_weights_after_loading = print
    named = [*module("RoutedExperts", quant_method=as_module).named_modules(prefix="experts")]
    assert [name for name, _ in named] == ["experts", "experts.quant_method"]
    assert transformed_after_loading(named) == []
    as_module.unquantized_backend.name = "AITER"
    assert transformed_after_loading(named) == ["experts rearranges its experts for AITER"]


GIB = 2**30


def block(gib, is_asleep, copy=None):
    return SimpleNamespace(is_asleep=is_asleep, handle=(0, gib * GIB, 0, 0), cpu_backup_tensor=copy)


def test_what_sleeps_is_no_memory_of_the_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr(vllm_memory, "memory_stats", lambda beside: seen.append(beside) or {"host_rss_gib": 1.0})
    weights, cache = block(3, True, torch.zeros(GIB // 1024, dtype=torch.uint8)), block(60, True)
    assert engine_memory_stats({1: weights, 2: cache}) == {
        "host_rss_gib": 1.0, "gpu_pools_gib": 0, "host_pools_gib": pytest.approx(1 / 1024)
    }  # fmt: skip
    assert engine_memory_stats({1: block(3, False), 2: cache})["gpu_pools_gib"] == 3
    assert seen == [-63 * GIB, -60 * GIB]


class ExpertMaps:
    """Finds experts as vLLM 0.25's `ExpertMapManager` does."""

    def __init__(self, expert_map):
        self.expert_map = expert_map

    def map_global_to_local(self, global_id):
        return global_id if self.expert_map is None else self.expert_map[global_id].item()


@pytest.mark.parametrize("expert_map", [None, torch.tensor([-1, -1, 0, 1], dtype=torch.int32)])
def test_experts_are_found_where_vllm_finds_them_without_reading_a_tensor(expert_map):
    layer = module("RoutedExperts", expert_map_manager=ExpertMaps(expert_map))
    expected = [layer.expert_map_manager.map_global_to_local(expert) for expert in range(4)]
    find_experts_on_host([torch.nn.Linear(2, 2), layer])
    if expert_map is not None:
        expert_map.fill_(7)
    assert [layer.expert_map_manager.map_global_to_local(expert) for expert in range(4)] == expected
