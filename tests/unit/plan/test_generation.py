import re

import pytest
from support.shard_facts import FACTS
from support.tiny import policy_without_model

from benchmarks.model_shapes import QWEN2_1_5B
from nemo_offload_rl.memory.units import GIB, MIB
from nemo_offload_rl.plan import generation
from nemo_offload_rl.plan.architecture import read_architecture
from nemo_offload_rl.plan.planner import make_plan
from nemo_offload_rl.plan.refit_graphs import exchanged_temporaries, export_temporaries, pool_bytes
from nemo_offload_rl.residency.table import Phase


@pytest.mark.parametrize(("offloads", "most"), [(True, 0.96), (False, 0.83)])
def test_a_share_of_the_gpu_has_to_fit_beside_what_the_policy_keeps(offloads, most):
    plan = make_plan(policy_without_model(offload_optimizer_for_refit=offloads), [FACTS])
    generation.check_share_beside_policy(plan, engine(1, gpu_memory_utilization=most), 80 * GIB)
    with pytest.raises(ValueError, match=rf"gpu_memory_utilization is 0\.98, which is 78\.4 of .*set it to {most} or"):
        generation.check_share_beside_policy(plan, engine(1, gpu_memory_utilization=0.98), 80 * GIB)


def test_a_kv_cache_that_does_not_fit_beside_the_policy_is_what_the_message_names():
    plan = make_plan(policy_without_model(), [FACTS])
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes is \d+, .* set it to (\d+) or less") as found:
        generation.check_share_beside_policy(plan, engine(1, {"kv_cache_memory_bytes": 79 * GIB}), 80 * GIB)
    most = int(re.search(r"set it to (\d+)", str(found.value))[1])
    generation.check_share_beside_policy(plan, engine(1, {"kv_cache_memory_bytes": most}), 80 * GIB)
    with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
        generation.check_share_beside_policy(plan, engine(1, {"kv_cache_memory_bytes": most + 2}), 80 * GIB)


def engine(tp, kwargs=None, sizes=None, hf_config=QWEN2_1_5B, colocated=True, buffer_gib=1.0, **section):
    policy = policy_without_model(precision=section.get("precision", "bfloat16"))
    kinds = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
    policy["megatron_cfg"] |= {f"{kind}_parallel_size": 1 for kind in kinds} | (sizes or SPLIT)
    own = {"tensor_parallel_size": tp, "expert_parallel_size": 1, "precision": "bfloat16", "max_model_len": 4096}
    own |= {"gpu_memory_utilization": 0.5, "enforce_eager": False} | section
    policy["generation"] = {"backend": "vllm", "vllm_cfg": own, "vllm_kwargs": kwargs or {}}
    policy["generation"]["colocated"] = {"enabled": colocated}
    policy["refit_buffer_size_gb"] = buffer_gib
    return generation.engine_memory(policy, hf_config)


SPLIT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
WHOLE = {"tensor_model_parallel_size": 1}


def test_an_engine_holds_its_part_of_the_weights_and_of_each_tokens_keys_and_values():
    for tp, heads in ((1, 2), (2, 1), (4, 1)):
        found = engine(tp)
        assert found.weights_bytes == 2 * 1_543_714_304 // tp  # the policy's own split does not count
        assert found.kv_bytes_per_token == 2 * 28 * heads * 128 * 2
        assert found.sequence_bytes == 4096 * found.kv_bytes_per_token


MOE = QWEN2_1_5B | {
    "model_type": "qwen3_moe", "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 64,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
}  # fmt: skip


def test_replicas_of_an_engine_share_its_experts_and_nothing_else():
    experts = 28 * 64 * 3 * 768 * 1536
    whole = engine(1, hf_config=MOE, sizes=WHOLE).weights_bytes // 2
    for tp, ep in ((1, 1), (2, 1), (2, 2), (1, 4), (2, 8)):
        found = engine(tp, hf_config=MOE, sizes=WHOLE, expert_parallel_size=ep)
        expected = (whole - experts) / tp + experts / max(tp, ep)
        assert abs(found.weights_bytes - 2 * expected) < 2
        heads = max(1, 2 // tp)
        assert found.kv_bytes_per_token == 2 * 28 * heads * 128 * 2


def test_a_gpu_with_whole_experts_has_room_for_the_tokens_of_all_replicas():
    def of_experts(tp, ep):
        found = engine(tp, hf_config=MOE, sizes=WHOLE, expert_parallel_size=ep).reserve_bytes
        attention = (12 + 2 * 2) * 128 // tp
        communicators = 1.5 * GIB if max(tp, ep) > 1 else 0
        return (found - 2 * GIB - communicators - 1024 * 151936 * 20) / (16384 * 2) - 4 * 1536 - attention

    assert of_experts(1, 1) == 8 * (3 * 768 + 1536)
    assert of_experts(2, 1) == 8 * (3 * 384 + 1536)
    assert of_experts(2, 2) == 8 * (3 * 768 + 1536)
    assert of_experts(1, 4) == 4 * 8 * (3 * 768 + 1536)


def test_other_engines_are_not_planned():
    policy = policy_without_model()
    assert generation.engine_memory(policy, QWEN2_1_5B) is None
    policy["generation"] = {"backend": "transformers"}
    assert generation.engine_memory(policy, QWEN2_1_5B) is None


# A pass of 16,384 tokens: residual, queries, keys, values and MLP; float32 logits thrice and indices; context, graphs.
RESERVE = 16384 * 2 * (4 * 1536 + 16 * 128 + 3 * 8960) + 1024 * 151936 * 20 + 2 * GIB


def test_the_kv_cache_gets_what_the_share_leaves():
    found = engine(1)
    assert found.reserve_bytes == RESERVE
    assert found.kv_cache_bytes(80 * GIB) == 40 * GIB - 2 * 1_543_714_304 - RESERVE
    assert found.share_of(80 * GIB) == 0.5
    fewer = engine(1, {"max_num_seqs": 8, "max_num_batched_tokens": 2048}, enforce_eager=True)
    assert fewer.reserve_bytes == 2048 * 2 * (4 * 1536 + 16 * 128 + 3 * 8960) + 8 * 151936 * 20 + GIB
    assert engine(1, {"max_num_seqs": None}).reserve_bytes == RESERVE  # null leaves it to vLLM: at most 1024


def test_the_kv_cache_is_no_larger_than_the_sequences_under_way_can_fill():
    few = engine(1, {"max_num_seqs": 2, "block_size": 128}, max_model_len=520)
    # 5 blocks and one more each, and the one that vLLM leaves unused
    assert few.kv_cache_bytes(80 * GIB) == few.most_kv_cache_bytes == 13 * 128 * few.kv_bytes_per_token
    assert few.share_of(80 * GIB) == (few.weights_bytes + few.reserve_bytes + few.most_kv_cache_bytes) / (80 * GIB)
    assert engine(1).share_of(80 * GIB) == 0.5  # 1024 sequences of 4096 tokens would take more


def test_a_capped_kv_cache_without_room_is_named_as_such():
    plan = make_plan(policy_without_model(offload_optimizer_for_refit=False), [FACTS])
    with pytest.raises(ValueError, match=r"With a KV cache for 64 sequences .*; lower max_num_seqs .* to 0\.\d+"):
        generation.check_share_beside_policy(plan, engine(1, {"max_num_seqs": 64}, max_model_len=512), 18 * GIB)


def test_a_kv_cache_of_the_recipe_wins():
    found = engine(1, {"kv_cache_memory_bytes": 3 * GIB})
    assert found.kv_cache_bytes(80 * GIB) == found.kv_cache_bytes(8 * GIB) == 3 * GIB
    assert found.share_of(80 * GIB) == (2 * 1_543_714_304 + RESERVE + 3 * GIB) / (80 * GIB)
    generation.check_longest_sequence_fits(found, GIB)
    generation.check_longest_sequence_fits(engine(1), 19 * GIB)
    with pytest.raises(ValueError, match=r"0\.5, which is 6\.00 .* take 2\.88 GiB .* 5\.\d+ GiB, .* 0\.109 GiB"):
        generation.check_longest_sequence_fits(engine(1), 12 * GIB)
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes is 1000, .* tokens needs 0\.109 GiB .* raise or"):
        generation.check_longest_sequence_fits(engine(1, {"kv_cache_memory_bytes": 1000}), 80 * GIB)


def test_a_refits_buckets_have_to_fit_beside_the_policy_and_the_engines_weights():
    found = engine(1)
    assert found.refit_bytes == GIB
    plan = make_plan(policy_without_model(), [FACTS])  # 2 GiB of parameters in a refit, 2 for the process, 1 of graphs
    generation.check_refit_fits(plan, found, 9 * GIB)
    with pytest.raises(ValueError, match=r"needs 1\.00 GiB .* 5\.00 GiB .* 2\.88 GiB of vLLM's .* has 8\.50"):
        generation.check_refit_fits(plan, found, int(8.5 * GIB))


# On an H200, by `residency/refit/graph_pool_gib` and `performance/memory/generation/refit_graph_pool_gib`.
MEASURED_POOLS_GIB = (0.023, 0.002)


def test_graphs_of_a_refit_keep_little_more_than_was_measured_at_most():
    # 6 MiB of query, key and value, of which key and value, three quarters each, are small.
    temporaries = export_temporaries(read_architecture(QWEN2_1_5B, {}), 2)
    assert temporaries == [size * 2 for size in (1536 * 1536, 256 * 1536, 256 * 1536, 1536, 256, 256)]
    pools = [pool_bytes(temporaries), pool_bytes([])]
    assert pools == [26 * MIB, 2 * MIB]
    for bound, measured in zip(pools, MEASURED_POOLS_GIB, strict=True):
        assert 0.95 * measured < bound / GIB < 1.15 * measured
    assert engine(1, sizes=WHOLE).refit_graph_bytes == sum(pools)
    in_float32 = engine(1, sizes=WHOLE, precision="float32")  # query 9 MiB, key and value 1.5, biases
    assert in_float32.refit_graph_bytes == (2 + 2 + 2 * 20 + 2) * MIB
    # Query 32 MiB, key and value 8 each, no biases.
    llama = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert engine(1, sizes=WHOLE, hf_config=QWEN2_1_5B | llama).refit_graph_bytes == (2 + 32 + 2 * 20 + 2) * MIB


@pytest.mark.parametrize("kind", ["tensor_model", "pipeline_model", "expert_model", "expert_tensor"])
def test_graphs_keep_three_of_the_largest_weight_where_ranks_exchange_weights(kind):
    split = {f"{kind}_parallel_size": 2}
    of_embedding = 446 * MIB  # 151,936 rows of 1,536 numbers
    for buffer_gib, most in ((4.0, (3 * 446 + 2) * MIB), (1.0, GIB)):
        found = engine(1, sizes=split, buffer_gib=buffer_gib).refit_graph_bytes
        assert found == most + 2 * MIB
        assert found > 2 * of_embedding  # an H200 kept 0.877 GiB with a tensor-parallel size of 2
    assert engine(1, sizes=WHOLE, colocated=False).refit_graph_bytes == 0


def test_experts_of_all_ranks_count_together_where_they_are_gathered():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 100, "num_experts": 8}
    experts = read_architecture(MOE | sizes | {"num_experts_per_tok": 2, "vocab_size": 300}, {})
    assert exchanged_temporaries(experts, 2, 1) == [300 * 64 * 2] * 3
    assert exchanged_temporaries(experts, 2, 4) == [2 * 100 * 4 * 64 * 2] * 3


def test_graphs_of_a_refit_are_there_in_every_phase_and_count_where_the_gpu_is_shared_out():
    found, whole = engine(1), engine(1, sizes=WHOLE)
    graphs, fewer = found.refit_graph_bytes, whole.refit_graph_bytes
    assert graphs > fewer > 0
    assert found.gpu_rows(80 * GIB)["refit's CUDA graphs"] == dict.fromkeys(Phase, graphs)
    plan = make_plan(policy_without_model(), [FACTS])
    least = 2 * GIB + 2 * GIB + found.weights_bytes + found.refit_bytes
    generation.check_refit_fits(plan, whole, least + fewer)
    with pytest.raises(ValueError, match=r"A refit needs 1\.00 GiB"):
        generation.check_refit_fits(plan, found, least + fewer)
    generation.check_refit_fits(plan, found, least + graphs)
    lost = generation.share_beside_policy(plan, whole, 80 * GIB) - generation.share_beside_policy(plan, found, 80 * GIB)
    assert lost == pytest.approx((graphs - fewer) / (80 * GIB))
