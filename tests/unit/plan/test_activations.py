"""Tests bytes of offloaded activations: against measurements, and by shape, split and schedule."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import TINY_QWEN3_MOE

from benchmarks.model_shapes import QWEN2_1_5B
from nemo_offload_rl.activation_offload.groups import Group
from nemo_offload_rl.activation_offload.report import ModuleReport
from nemo_offload_rl.activation_offload.schedule import Profile, choose_in_first_pass, choose_offloaded
from nemo_offload_rl.config import load
from nemo_offload_rl.config.megatron import ACTIVATION_MODULES, EXPERT_MODULES
from nemo_offload_rl.memory.units import GIB, MIB
from nemo_offload_rl.plan.activations import (
    EXPERT_LOAD_FACTOR,
    SLAB_ALIGNMENT_BYTES,
    ActivationOptions,
    activation_facts,
    chunks_in_flight,
    module_bytes,
    needed_slab_bytes,
    slab_bytes,
)
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import plan_run
from nemo_offload_rl.plan.saved_tensors import SAVED_BY, ActivationFacts
from tests.unit.config.conftest import CONFIGS
from tests.unit.plan.test_report import BENCHMARK, printed, row

RECIPE = CONFIGS / "grpo_math_1B_megatron.yaml"
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
EXPERTS = ("mlp_norm", "expert_fc1", "moe_act")

# The measured model: sequences of 4096, micro-batch 4.
DENSE = ActivationFacts(
    num_tokens=4 * 4096, num_residual_tokens=4 * 4096, num_expert_tokens=0, hidden_size=2048, num_heads=16,
    num_query_groups=8, head_dim=128, qk_norm=False, expert_ffn_size=0, fused_swiglu=True, element_size=2,
    num_layers=16, num_model_chunks=1, num_chunks_in_flight=1,
)  # fmt: skip
MOE = dataclasses.replace(DENSE, num_expert_tokens=2 * DENSE.num_tokens, expert_ffn_size=2048)


def asked(*modules: str, fraction: float = 1.0, smallest: int = 1 << 20, limit: int | None = None):
    return ActivationOptions(modules, fraction, smallest, limit)


def layer_mib(facts: ActivationFacts, *modules: str, **arguments: Any) -> dict[str, float]:
    return {name: size.distinct / MIB for name, size in module_bytes(facts, asked(*modules, **arguments)).items()}


@pytest.mark.parametrize(("modules", "moved_mib", "saved_mib"), [(("core_attn",), 2880, 1918), (ATTENTION, 5760, 4730)])
def test_what_was_measured_on_an_h200(modules, moved_mib, saved_mib):
    """Compares with megatron-core's manager on one H200 with 16 layers.

    For each module it keeps the last layer's group on the GPU, copies a storage again for each module, and reports the
    bytes of one micro-batch.
    """
    layer = module_bytes(DENSE, asked(*modules)).values()
    assert 15 * sum(size.saved for size in layer) / MIB == pytest.approx(moved_mib, rel=0.02)
    assert 15 * sum(size.distinct - size.held for size in layer) / MIB == pytest.approx(saved_mib, rel=0.02)


def test_each_module_of_a_dense_layer():
    found = layer_mib(DENSE, *(name for name in SAVED_BY if name != "layer_input"))
    assert {name: size for name, size in found.items() if size} == {  # core_attn also copies what attn_proj saves
        "qkv_linear": 64 + 64,
        "core_attn": 64 + 32 + 32 + 64,
    }
    assert layer_mib(DENSE, "attn_proj") == {"attn_proj": 64}
    with_norms = dataclasses.replace(DENSE, qk_norm=True)
    assert layer_mib(with_norms, "qkv_linear") == {"qkv_linear": 128 + 64 + 32}


def test_full_recomputation_keeps_the_input_of_each_segment_and_perhaps_attention():
    assert layer_mib(DENSE, "layer_input", "core_attn") == {"layer_input": 64, "core_attn": 64}
    settings = asked("layer_input", "core_attn")
    sizes = module_bytes(dataclasses.replace(DENSE, num_layers_of_segment=3), settings)
    assert {name: (size.in_flight / MIB, size.held) for name, size in sizes.items()} == {
        "layer_input": (6 * 64, 0),  # of 16 layers in segments of 3, 3, 3, 3, 3, and 1
        "core_attn": (16 * 64, 0),
    }
    later = dataclasses.replace(DENSE, receives_input=True)  # the first input stays: the pipeline's schedule holds it
    assert module_bytes(later, settings)["layer_input"].in_flight == 15 * 64 * MIB
    assert module_bytes(later, settings)["core_attn"].in_flight == 16 * 64 * MIB


def test_every_module_that_a_recipe_may_name_is_known_here():
    assert set(SAVED_BY) == set(ACTIVATION_MODULES)
    for name in EXPERT_MODULES:
        assert list(SAVED_BY[name](MOE))
        assert not list(SAVED_BY[name](DENSE))


def test_the_attention_output_stays_where_one_of_its_two_modules_stays():
    assert module_bytes(DENSE, asked("core_attn"))["core_attn"].held == 64 * MIB
    assert module_bytes(DENSE, asked("attn_proj"))["attn_proj"].held == 64 * MIB
    assert not any(size.held for size in module_bytes(MOE, asked(*ATTENTION, *EXPERTS)).values())


def test_each_module_of_experts():
    # 32768 copies of tokens with 2048 elements; gate and up projection are as wide.
    assert layer_mib(MOE, *EXPERTS) == {"mlp_norm": 64, "expert_fc1": 128, "moe_act": 256}
    assert layer_mib(MOE, "fused_group_mlp") == {"fused_group_mlp": 128 + 256 + 128}
    one_by_one = dataclasses.replace(MOE, fused_swiglu=False)
    assert layer_mib(one_by_one, "moe_act") == {"moe_act": 256 + 3 * 128}


def test_small_tensors_stay_unless_the_recipe_says_so():
    log_sum = 16 * DENSE.num_tokens * 4 / MIB
    assert layer_mib(DENSE, "core_attn", smallest=16 * DENSE.num_tokens) == {"core_attn": 192 + log_sum}
    assert layer_mib(DENSE, "core_attn", smallest=16 * DENSE.num_tokens + 1) == {"core_attn": 192}
    # Keys and values have half the elements of queries.
    assert layer_mib(DENSE, "core_attn", smallest=DENSE.num_tokens * 2048) == {"core_attn": 64 + 64}
    assert layer_mib(DENSE, "core_attn", smallest=1 << 40) == {"core_attn": 0}


IN_FLIGHT = [
    (8, 0, 1, 1, 1), (8, 0, 4, 1, 4), (8, 3, 4, 1, 1), (2, 0, 4, 1, 2),
    (8, 0, 2, 2, 2 + 2 + 1), (8, 1, 2, 2, 2 + 1), (2, 0, 2, 2, 4), (16, 1, 4, 3, 2 * 2 + 2 * 4 + 1),
]  # fmt: skip


@pytest.mark.parametrize(("num_microbatches", "stage", "num_stages", "num_model_chunks", "in_flight"), IN_FLIGHT)
def test_passes_in_flight_are_those_of_megatron(num_microbatches, stage, num_stages, num_model_chunks, in_flight):
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    split: dict[str, Any] = {"stage": stage, "num_stages": num_stages, "num_model_chunks": num_model_chunks}
    assert chunks_in_flight(num_microbatches, **split, group_size=num_stages) == in_flight
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: num_stages, rank=lambda: stage),
        virtual_pipeline_model_parallel_size=num_model_chunks if num_model_chunks > 1 else None,
    )
    sizes = (num_microbatches, num_model_chunks, num_stages)
    total, all_in_warmup, num_warmup, _ = get_pp_rank_microbatches(*sizes, p2p_communicator=communicator)
    assert in_flight == (total if all_in_warmup else num_warmup + 1)


def test_what_is_in_flight_fills_the_slab():
    in_flight = dataclasses.replace(DENSE, num_chunks_in_flight=3)
    sizes = module_bytes(in_flight, asked(*ATTENTION))
    assert sizes["core_attn"].micro_batch == 16 * 192 * MIB
    assert sizes["core_attn"].in_flight == 3 * 16 * 192 * MIB
    assert slab_bytes(in_flight, asked(*ATTENTION)) == sum(size.in_flight for size in sizes.values())
    # In two virtual stages of 8 layers five passes are two and a half micro-batches.
    interleaved = dataclasses.replace(DENSE, num_model_chunks=2, num_chunks_in_flight=5)
    assert module_bytes(interleaved, asked("core_attn"))["core_attn"].micro_batch == 16 * 192 * MIB
    assert slab_bytes(interleaved, asked("core_attn")) == 5 * 8 * 192 * MIB


def test_storages_start_at_pages():
    tiny = dataclasses.replace(DENSE, num_tokens=3, num_residual_tokens=3, hidden_size=10, num_layers=2)
    assert module_bytes(tiny, asked("qkv_linear", smallest=0))["qkv_linear"].distinct == 2 * 60 + 12
    assert slab_bytes(tiny, asked("qkv_linear", smallest=0)) == 2 * 3 * SLAB_ALIGNMENT_BYTES
    assert slab_bytes(tiny, asked("qkv_linear", smallest=4)) == 2 * 2 * SLAB_ALIGNMENT_BYTES


def test_host_memory_is_for_experts_that_are_busier_than_the_average():
    average = module_bytes(MOE, asked("moe_act"))["moe_act"].in_flight
    assert slab_bytes(MOE, asked("moe_act")) == EXPERT_LOAD_FACTOR * average
    # Attention does not depend on experts.
    assert slab_bytes(MOE, asked("core_attn")) == slab_bytes(DENSE, asked("core_attn"))


def test_offsets_and_seeds_of_attention_have_room_where_the_smallest_tensors_move():
    def pages(*modules: str, smallest: int) -> float:
        named = sum(size.in_flight for size in module_bytes(DENSE, asked(*modules, smallest=smallest)).values())
        return (needed_slab_bytes(DENSE, asked(*modules, smallest=smallest)) - named) / SLAB_ALIGNMENT_BYTES

    assert pages("core_attn", smallest=0) == pages("core_attn", smallest=1024) == 8 * DENSE.num_layers
    assert pages("core_attn", smallest=1025) == 0  # such tensors stay on the GPU
    assert pages("qkv_linear", smallest=0) == 0  # it has none


def test_the_recipe_may_size_the_slab():
    assert slab_bytes(DENSE, asked("core_attn", limit=GIB)) == GIB
    assert needed_slab_bytes(DENSE, asked("core_attn", limit=GIB)) == 3 * GIB
    assert slab_bytes(DENSE, asked("core_attn", limit=100 * GIB)) == 100 * GIB
    assert slab_bytes(DENSE, asked("core_attn")) == 3 * GIB


def test_a_fraction_is_kept_layer_by_layer():
    def layers(fraction: float) -> list[float]:
        sizes = module_bytes(DENSE, asked("qkv_linear", "core_attn", "attn_norm", fraction=fraction))
        return [sizes[name].micro_batch / (size * MIB) for name, size in (("qkv_linear", 128), ("core_attn", 192))]

    assert layers(1.0) == [16, 16]
    assert layers(0.75) == [12, 12]
    assert layers(0.5) == [8, 8]
    # 10 times 128 MiB are a quarter of 16 times 320; a limit with room for 192 has room for 128.
    assert layers(0.25) == [10, 0]
    assert layers(0.0) == [0, 0]
    assert slab_bytes(DENSE, asked("core_attn", fraction=0.25)) == 4 * 192 * MIB
    assert slab_bytes(DENSE, asked("core_attn", fraction=0.0)) == 0


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.33, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0])
def test_the_manager_chooses_as_many_groups_and_host_memory_holds_them_in_the_first_pass_too(fraction):
    """The first pass offloads other groups than later ones."""
    modules = {"qkv_linear": 128 * MIB, "core_attn": 192 * MIB}
    options = asked(*modules, fraction=fraction)
    groups = []
    for layer in range(16):
        for name, size in modules.items():
            group = Group(name, lambda: None, ModuleReport())
            group.key, group.nbytes = (name, layer), size
            groups.append(group)
    leaves = Profile(groups, fraction, has_margin=False).offloads
    planned = module_bytes(DENSE, options)
    for name, size in modules.items():
        assert planned[name].micro_batch == size * sum(leaves[name, layer] for layer in range(16))
    sizes = [*modules.values()] * 16
    for which in (choose_offloaded, choose_in_first_pass):
        goes = which([[*modules.values()]] * 16, fraction)
        assert slab_bytes(DENSE, options) >= sum(size for size, leaves in zip(sizes, goes, strict=True) if leaves)


def policy_of(*overrides: str, packs: bool = False, **megatron: Any) -> Any:
    recipe = load(RECIPE, ["policy.max_total_sequence_length=1000", "cluster.gpus_per_node=8", *overrides])
    policy = recipe.config["policy"]
    policy["sequence_packing"]["enabled"] = packs
    policy["megatron_cfg"] |= megatron
    return policy


def facts_of(policy: Any, hf_config: dict[str, Any] = QWEN2_1_5B) -> Any:
    """Returns the facts of the only stage of eight ranks."""
    [facts] = activation_facts(hf_config, policy, world_size=8)
    return facts


def test_the_longest_padded_micro_batch_of_a_recipe():
    facts = facts_of(policy_of("policy.train_micro_batch_size=4", "policy.make_sequence_length_divisible_by=64"))
    assert facts.num_tokens == facts.num_residual_tokens == 4 * 1024
    assert (facts.num_layers, facts.hidden_size, facts.num_heads, facts.num_query_groups) == (28, 1536, 12, 2)
    assert (facts.element_size, facts.num_chunks_in_flight, facts.is_moe) == (2, 1, False)


def test_a_packed_row_is_as_long_as_the_recipe_lets_it():
    policy = policy_of(packs=True)
    policy["sequence_packing"] |= {"train_mb_tokens": 3000, "sequence_length_round": 64}
    assert facts_of(policy).num_tokens == 3008
    policy["sequence_packing"]["train_mb_tokens"] = 100  # a sequence of 100 is padded to 128
    policy["make_sequence_length_divisible_by"] = 128
    assert facts_of(policy).num_tokens == 128


def test_tensor_parallel_ranks_share_heads_and_with_sequence_parallelism_tokens():
    split = ("policy.max_total_sequence_length=1024", "policy.megatron_cfg.tensor_model_parallel_size=4")
    facts, shard = (facts_of(policy_of(*split, sequence_parallel=shares)) for shares in (False, True))
    assert (facts.num_heads, facts.num_query_groups) == (3, 1)  # both ranks hold the same group
    assert (facts.num_residual_tokens, shard.num_residual_tokens) == (facts.num_tokens, facts.num_tokens // 4)
    assert shard.num_tokens == facts.num_tokens


def test_stages_hold_fewer_micro_batches_the_later_they_are():
    split = ("policy.megatron_cfg.pipeline_model_parallel_size=4", "policy.train_global_batch_size=64")
    policy = policy_of(*split, packs=True)
    stages = activation_facts(QWEN2_1_5B, policy, world_size=8)
    assert [facts.num_chunks_in_flight for facts in stages] == [4, 3, 2, 1]
    assert [facts.num_layers for facts in stages] == [7, 7, 7, 7]
    policy["train_global_batch_size"] = 2 * 2 * policy["train_micro_batch_size"]  # two for each of two ranks
    policy["sequence_packing"]["enabled"] = False
    stages = activation_facts(QWEN2_1_5B, policy, world_size=8)
    assert [facts.num_chunks_in_flight for facts in stages] == [2, 2, 2, 1]


def test_experts_that_are_padded_compute_on_their_capacity():
    for padding, share in ((False, 2), (True, 3)):  # without padding: at most as many tokens
        experts = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": padding}
        facts = facts_of(policy_of(**experts), TINY_QWEN3_MOE)
        assert facts.num_expert_tokens == share * facts.num_tokens


def test_experts_get_their_share_of_every_expert_parallel_ranks_tokens():
    hf_config, shared_out = TINY_QWEN3_MOE | {"num_experts": 8}, {"expert_model_parallel_size": 4}
    alone = facts_of(policy_of(), hf_config)
    assert alone.num_expert_tokens == 2 * alone.num_tokens
    assert alone.expert_ffn_size == 64
    assert facts_of(policy_of(**shared_out), hf_config) == alone
    # Two ranks that share each expert see each other's tokens; with sequence parallelism each has half of them.
    split = {"expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    shared = facts_of(policy_of(**shared_out, **split), hf_config)
    assert shared.num_expert_tokens == alone.num_expert_tokens
    assert shared.expert_ffn_size == 32


OFFLOADED = ["policy.megatron_cfg.fine_grained_activation_offloading=true"]
OFFLOADED += ["policy.megatron_cfg.offload_modules=[core_attn,qkv_linear]"]


def test_what_a_recipe_asks_for():
    assert settings(policy_of()).activations is None
    policy = policy_of(*OFFLOADED)
    assert settings(policy).activations == asked("core_attn", "qkv_linear")
    policy["megatron_cfg"] |= {"activation_offload_fraction": 0.5, "min_offloaded_tensor_size": 7}
    policy["activation_offload"] = {"strict": True, "host_memory_limit_gib": 1.5}
    expected = asked("core_attn", "qkv_linear", fraction=0.5, smallest=7, limit=int(1.5 * GIB))
    assert settings(policy).activations == dataclasses.replace(expected, strict=True)


def test_the_slab_is_part_of_what_a_rank_needs():
    config = load(RECIPE, OFFLOADED).config
    run = plan_run(config, QWEN2_1_5B, algorithm="grpo")
    rank = run.plan.largest_rank
    assert rank.activations is not None
    assert rank.activations.slab_bytes > 0
    assert run.needs[0].fixed_bytes == rank.fixed_bytes == {"activations": rank.activations.slab_bytes}
    total = sum(rank.host_bytes.values()) + rank.activations.slab_bytes
    assert run.needs[0].total_bytes == rank.total_host_bytes == total


def test_a_limit_that_only_the_slab_exceeds_names_the_slabs_keys():
    config = load(RECIPE, [*OFFLOADED, "policy.residency.host_memory_limit_gib=20.5"]).config
    config["policy"]["max_total_sequence_length"] = 32768
    with pytest.raises(HostBudgetError) as caught:
        plan_run(config, QWEN2_1_5B, algorithm="grpo")
    remedy = next(line for line in str(caught.value).splitlines() if "offload_modules" in line)
    assert "enough: a lower policy.activation_offload.host_memory_limit_gib or fewer" in remedy
    assert "reference_weights  activations     total" in str(caught.value)
    config["policy"]["activation_offload"] = {"strict": False, "host_memory_limit_gib": 0.25}
    assert plan_run(config, QWEN2_1_5B, algorithm="grpo").needs[0].fixed_bytes == {"activations": GIB // 4}


LONG = ("policy.max_total_sequence_length=4096", "policy.train_micro_batch_size=2", *OFFLOADED)


def test_the_plan_prints_each_module_and_the_slab(capsys):
    text = printed(capsys, BENCHMARK, *LONG)
    table = text[text.index("Activations that one rank offloads") :]
    assert "28 layers, micro-batches of 8,192 tokens" in table
    assert "1 of them in flight" in table
    # 8192 tokens of 1536 elements are 24 MiB, those of two query groups 4.
    assert row(table, "qkv_linear") == ["qkv_linear", "48.0", "1.31", "", "0.026"]
    assert row(table, "core_attn") == ["core_attn", "56.0", "1.53", "", "0.030"]
    assert row(table, "all") == ["all", "104.0", "2.84", "2.84", "0.056"]
    assert "24.0 MiB a layer of core_attn also stay on the GPU unless attn_proj is offloaded" in table
    assert row(text[text.index("One rank in GiB") :], "activations")[-1] == "2.84"
    assert "Host memory: 22.97 GiB for the one rank on a host." in text  # 20.13 without
    limit = "++policy.activation_offload.host_memory_limit_gib=1"
    text = printed(capsys, BENCHMARK, *LONG, "policy.megatron_cfg.offload_modules=[qkv_linear,mlp_norm]", limit)
    assert "mlp_norm saves no activations of its own in this model" in text
    assert "host_memory_limit_gib is below the 1.31 GiB that activations in flight may take" in text
    assert "Host memory: 21.13 GiB for the one rank on a host." in text


def test_json_has_the_bytes_of_every_module_that_moves(capsys):
    plan = json.loads(printed(capsys, BENCHMARK, "--json"))
    assert plan["activations"] is plan["stages"][0]["activations"] is None
    plan = json.loads(printed(capsys, BENCHMARK, *LONG, "--json"))
    assert plan["activations"]["modules"] == ["core_attn", "qkv_linear"]
    [stage] = plan["stages"]
    assert stage["activations"]["modules"]["qkv_linear"]["distinct"] == 48 * MIB
    assert stage["activations"]["slab_bytes"] == stage["activations"]["needed_bytes"] == 28 * 104 * MIB
    host = sum(stage["host_bytes"].values()) + stage["activations"]["slab_bytes"]
    assert plan["host_bytes_per_host"] == {"host 0": host}
