"""Tests parameter counts against built models: every family, and every way to split one."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, tiny_policy

from benchmarks import model_shapes as shapes
from nemo_offload_rl.config.model.families import FAMILIES
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.model_facts import fp32_grad_bytes, optimizer_size, shard_facts
from nemo_offload_rl.residency.params_and_grads import estimate_grad_bytes

SHAPE: dict[str, Any] = {key: TINY_QWEN3[key] for key in TINY_QWEN3 if key not in ("model_type", "head_dim")}
UNTIED = {"tie_word_embeddings": False}
HF_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SHAPE | UNTIED | {"model_type": "llama"},
    "mistral": SHAPE | UNTIED | {"model_type": "mistral", "num_key_value_heads": 1},
    "qwen2": SHAPE | {"model_type": "qwen2"},
    "qwen3": TINY_QWEN3,
    "qwen3_moe": TINY_QWEN3_MOE,
    "gemma": SHAPE | {"model_type": "gemma", "head_dim": 24},
}
KNOWN_FAMILIES = [name for name, family in FAMILIES.items() if family.has_known_sizes]
# Each family with flags that change which parameters it has.
FLAGS: dict[str, dict[str, Any]] = {
    "attention_biases": {"attention_bias": True},
    "mlp_biases": {"mlp_bias": True},
    "all_biases": {"attention_bias": True, "mlp_bias": True},
    "first_dense": {"mlp_only_layers": [0]},
    "odd_vocabulary": {"vocab_size": 15},
    "untied": UNTIED,
}
VPP2, PP2 = {"virtual_pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in HF_CONFIGS},
    "qwen3_moe_frozen_router": ("qwen3_moe", {"freeze_moe_router": True}),
    "qwen3_bf16": ("qwen3", {}),
    "llama_attention_biases": ("llama", {}),
    "llama_mlp_biases": ("llama", {}),
    "llama_all_biases": ("llama", {}),
    "qwen3_attention_biases": ("qwen3", {}),
    "qwen3_moe_first_dense": ("qwen3_moe", {"freeze_moe_router": True}),
    "gemma_untied": ("gemma", {}),  # Megatron-Bridge ties them all the same
}
TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("qwen2", {}),
    "tp2_odd_vocabulary": ("qwen2", TP2),
    "tp2_one_query_group": ("mistral", TP2),
    "pp2_tied": ("qwen3", PP2),
    "pp2_untied_uneven": ("llama", PP2 | {"num_layers_in_first_pipeline_stage": 1}),
    "pp2_vpp2": ("qwen3", PP2 | VPP2),
    "moe_pp2_first_dense": ("qwen3_moe", PP2),
    "moe_pp2_vpp2_first_dense": ("qwen3_moe", PP2 | VPP2),
    "moe_dp2": ("qwen3_moe", {}),
    "moe_ep2": ("qwen3_moe", {"expert_model_parallel_size": 2, "freeze_moe_router": True}),
    "moe_tp2_etp2": ("qwen3_moe", TP2 | {"expert_tensor_parallel_size": 2}),
}


def policy_of(layout: str) -> dict[str, Any]:
    family, megatron = (ALONE | TOGETHER)[layout]
    hf_config = HF_CONFIGS[family]
    for name, flags in FLAGS.items():
        if layout.endswith(name):
            hf_config = hf_config | flags
    even: dict[str, Any] = {"num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None}
    return tiny_policy(hf_config, "bfloat16" if layout.endswith("bf16") else "float32", **(even | megatron))


def optimizer_bytes(optimizer: Any, model: list[Any]) -> int:
    """Returns the bytes of the optimizer's state after a step, without what lies in the model's parameter buffers."""
    buffers = {buffer.param_data.untyped_storage().data_ptr() for chunk in model for buffer in chunk.buffers}
    kept = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().clone()
            kept.append(parameter)
    for part in optimizer.chained_optimizers:
        part.optimizer.step()
        kept += [value for values in part.optimizer.state.values() for value in values.values() if value.dim()]
    return sum(tensor.nbytes for tensor in kept if tensor.untyped_storage().data_ptr() not in buffers)


def build_and_count(layout: str, rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Returns what a worker really holds, and transformers' config for the recipe's mapping."""
    from megatron.core import parallel_state

    from nemo_offload_rl.hf_config import hf_config
    from nemo_offload_rl.mcore import distributed
    from nemo_offload_rl.mcore.build import build
    from nemo_offload_rl.mcore.model.model_config import parallel_sizes

    policy: Any = policy_of(layout)
    distributed.initialize(
        parallel_sizes(policy["megatron_cfg"]), rank=rank, world_size=world_size, local_rank=rank,
        master_addr="localhost", master_port=port, seed=3, te_rng_tracker=False,
    )  # fmt: skip
    state = build(policy, hf_config(policy), seed=3, init_optimizer=True)
    parameters = [parameter for _, parameter in state.parameters()]
    optimizer = state.optimizer
    assert optimizer is not None
    counted = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "num_params": sum(p.numel() for p in parameters if p.requires_grad),
        "num_frozen_params": sum(p.numel() for p in parameters if not p.requires_grad),
        "num_optimizer_params": sum(p.numel() for group in optimizer.param_groups for p in group["params"]),
        "num_tensors": len(parameters),
        "optimizer_bytes": optimizer_bytes(optimizer, state.model),
        "hf_config": hf_config(policy).to_dict(),
    }
    distributed.destroy()
    for kind in ("FLASH", "FUSED", "UNFUSED"):  # set by megatron-core for this model's attention, and refused by others
        os.environ.pop(f"NVTE_{kind}_ATTN", None)
    return counted


def build_all(layouts: list[str], rank: int, world_size: int, ports: list[int]) -> dict[str, dict[str, Any]]:
    return {name: build_and_count(name, rank, world_size, port) for name, port in zip(layouts, ports, strict=True)}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return run_ranks(partial(build_all, [*ALONE]), 1, num_ports=len(ALONE))[0]


@pytest.fixture(scope="module")
def together() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(partial(build_all, [*TOGETHER]), 2, num_ports=len(TOGETHER))


def test_every_family_is_built_and_on_the_page_about_models():
    assert set(HF_CONFIGS) == set(KNOWN_FAMILIES)
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    [header] = [line for line in page.splitlines() if line.startswith("| flag | llama ")]
    assert header.strip("| ").split(" | ")[1:] == KNOWN_FAMILIES


@pytest.mark.parametrize("layout", ALONE)
def test_a_rank_alone_is_counted_exactly(alone, layout):
    built = alone[layout]
    [facts] = shard_facts(built["hf_config"], policy_of(layout), world_size=1, has_reference=False)
    assert facts.num_params == built["num_params"] > 0
    assert facts.num_frozen_params == built["num_frozen_params"]
    assert facts.num_optimizer_params == built["num_optimizer_params"] == built["num_params"]
    assert facts.param_size == facts.grad_size == (2 if layout == "qwen3_bf16" else 4)
    if not layout.startswith("qwen3_moe"):  # experts' parameters have their own buffers
        assert facts.num_optimizer_params * facts.optimizer_size == built["optimizer_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", TOGETHER)
def test_ranks_that_share_a_model_are_counted_exactly(together, layout):
    ranks = [counted[layout] for counted in together]
    policy = policy_of(layout)
    stages = shard_facts(ranks[0]["hf_config"], policy, world_size=2, has_reference=False)
    assert len(stages) == policy["megatron_cfg"]["pipeline_model_parallel_size"]
    for stage, facts in enumerate(stages):
        here = [counted for counted in ranks if counted["stage"] == stage]
        assert {facts.num_params} == {counted["num_params"] for counted in here}
        assert {facts.num_frozen_params} == {counted["num_frozen_params"] for counted in here}
        largest = max(counted["num_optimizer_params"] for counted in here)
        if layout in ("dp2", "moe_dp2", "moe_ep2"):
            padding = (64 * here[0]["num_tensors"] + 4 * 128) // 2
            assert largest <= facts.num_optimizer_params <= largest + padding
            assert sum(counted["num_optimizer_params"] for counted in here) >= facts.num_params
        else:
            assert facts.num_optimizer_params == largest == facts.num_params


GEMMA_2B = {
    **{"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 18},
    **{"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256_000},
}
# Parameters of public models, from their config.json.
PUBLIC: dict[int, dict[str, Any]] = {
    **{494_032_768: shapes.QWEN2_0_5B, 1_543_714_304: shapes.QWEN2_1_5B, 7_615_616_512: shapes.QWEN2_7B},
    **{8_190_735_360: shapes.QWEN3_8B, 32_762_123_264: shapes.QWEN3_32B, 30_532_122_624: shapes.QWEN3_30B_A3B},
    **{1_235_814_400: shapes.LLAMA_1B, 8_030_261_248: shapes.LLAMA_8B, 70_553_706_496: shapes.LLAMA_70B},
    2_506_172_416: GEMMA_2B,
}


def test_public_models_have_the_parameters_that_they_are_known_for():
    for num_params, hf_config in PUBLIC.items():
        [facts] = shard_facts(hf_config, policy_of("qwen2"), world_size=1, has_reference=True)
        assert facts.num_params == num_params
        assert facts.has_reference


def test_stages_together_are_the_model_and_ranks_share_the_experts_less_than_the_rest():
    sizes = {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 4}
    policy = policy_of("qwen3_moe")
    policy["megatron_cfg"] |= sizes
    stages = shard_facts(shapes.QWEN3_30B_A3B, policy, world_size=32, has_reference=False)
    experts = 48 * 128 * 3 * 2048 * 768
    num_params = 30_532_122_624
    assert sum(stage.num_params for stage in stages) == num_params - experts + experts // 4
    # With 8 data-parallel ranks, each expert is on 2 of them, because experts are split over 4.
    for stage in stages[1:3]:
        rest = stage.num_params - experts // 16
        assert stage.num_optimizer_params == pytest.approx(rest / 8 + experts / 16 / 2, rel=1e-5)
        assert stage.num_optimizer_params >= rest / 8 + experts / 16 / 2


def test_bytes_of_optimizer_state_a_parameter():
    aware, sgd = {"use_precision_aware_optimizer": True}, {"optimizer": "sgd", "sgd_momentum": 0.0}
    for precision, settings, nbytes in (
        ("bfloat16", {}, 12),
        ("float32", {}, 8),
        ("bfloat16", aware, 10),
        ("bfloat16", aware | {"store_param_remainders": False}, 12),
        ("bfloat16", aware | {"exp_avg_dtype": "bfloat16"}, 8),
        ("bfloat16", aware | {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"}, 4),
        ("bfloat16", sgd | {"sgd_momentum": 0.9}, 8),
        ("bfloat16", sgd, 4),
        ("float32", sgd, 0),
    ):
        policy = tiny_policy(precision=precision)
        policy["megatron_cfg"]["optimizer"] |= settings
        assert optimizer_size(policy) == nbytes, (precision, settings)


def test_gradients_are_reduced_in_the_type_that_the_recipe_says():
    policy = policy_of("qwen3_bf16")
    policy["megatron_cfg"]["distributed_data_parallel_config"]["grad_reduce_in_fp32"] = True
    [facts] = shard_facts(TINY_QWEN3, policy, world_size=1, has_reference=False)
    assert (facts.param_size, facts.grad_size) == (2, 4)
    policy["megatron_cfg"]["optimizer"]["use_distributed_optimizer"] = False  # every rank keeps all
    [facts] = shard_facts(TINY_QWEN3, policy, world_size=8, has_reference=False)
    assert facts.num_optimizer_params == facts.num_params


@pytest.mark.parametrize(("patterns", "size"), [((), 2), (("all",), 6), (("*.linear_fc1.*",), 6)])
def test_gradients_that_are_accumulated_in_fp32_take_memory_beside_the_buffer(patterns, size):
    policy = policy_of("qwen3_bf16")
    ddp = policy["megatron_cfg"]["distributed_data_parallel_config"]
    ddp["param_name_patterns_for_fp32_local_accumulation"] = list(patterns)
    [facts] = shard_facts(TINY_QWEN3, policy, world_size=1, has_reference=False)
    assert estimate_grad_bytes(facts) == size * facts.num_params
    assert (fp32_grad_bytes(policy, facts) == 0) is ("all" in patterns)  # the optimizer copies no fp32 gradients


def test_layers_of_experts_that_are_not_the_models_own_are_refused():
    policy = policy_of("qwen3_moe_first_dense")
    policy["megatron_cfg"]["moe_layer_freq"] = [0, 1, 1, 1]
    shard_facts(policy["hf_config"] | {"tie_word_embeddings": True}, policy, world_size=1, has_reference=False)
    policy["megatron_cfg"]["moe_layer_freq"] = 2
    with pytest.raises(ValueError, match=r"moe_layer_freq is 2, but mlp_only_layers .* 3 of the model's 4 layers"):
        shard_facts(policy["hf_config"], policy, world_size=1, has_reference=False)


NOT_COUNTED = [
    ({"model_type": "gpt_neox"}, {}, 1, "model_type is 'gpt_neox', and the plan knows the sizes only of"),
    ({"model_type": None}, {}, 1, "model_type is null, and the plan knows the sizes only of 'llama', "),
    ({}, {"moe_shared_expert_intermediate_size": 64}, 1, r"_size changes .* the plan does not know \(found 64\)"),
    ({"vocab_size": None}, {}, 1, "has no vocab_size; give policy.hf_config.vocab_size"),
    ({}, {"tensor_model_parallel_size": 8}, 8, "_parallel_size is 8, which does not divide the model's 4"),
    ({}, {"pipeline_model_parallel_size": 3}, 3, "_parallel_size is 3, but 4 of the model's 4 layers"),
    ({}, {"expert_model_parallel_size": 2}, 2, "is 2, but policy.hf_config is a dense model"),
    ({"intermediate_size": 130}, {"tensor_model_parallel_size": 4}, 4, "which does not divide the 130 rows of the"),
]


@pytest.mark.parametrize(("changed", "megatron", "world_size", "message"), NOT_COUNTED)
def test_what_cannot_be_counted_or_split_is_said(changed, megatron, world_size, message):
    policy = policy_of("qwen3")
    policy["megatron_cfg"] |= megatron
    with pytest.raises(ValueError, match=message) as caught:
        shard_facts(TINY_QWEN3 | changed, policy, world_size=world_size, has_reference=False)
    assert isinstance(caught.value, UnknownArchitectureError) is ("the plan" in message)
