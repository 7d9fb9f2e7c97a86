import pytest
from support.tiny import policy_without_model

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.generation import check_longest_sequence_fits, check_share_beside_policy, engine_memory
from nemo_offload_rl.plan.planner import make_plan
from nemo_offload_rl.residency.table import ShardFacts

# 10 GiB of optimizer state, 2 of parameters and 4 of gradients.
FACTS = ShardFacts(
    num_params=GIB,
    num_frozen_params=0,
    param_size=2,
    grad_size=4,
    num_optimizer_params=GIB,
    optimizer_size=10,
    has_reference=False,
)


@pytest.mark.parametrize(("offloads", "most"), [(True, 0.97), (False, 0.85)])
def test_a_share_of_the_gpu_has_to_fit_beside_what_the_policy_keeps(offloads, most):
    plan = make_plan(policy_without_model(offload_optimizer_for_refit=offloads), [FACTS])
    check_share_beside_policy(plan, most, 80 * GIB)
    with pytest.raises(ValueError, match=rf"gpu_memory_utilization is 0\.98, which is 78\.4 of .*set it to {most} or"):
        check_share_beside_policy(plan, 0.98, 80 * GIB)


QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def engine(tp, **section):
    policy = policy_without_model(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    section = {"tensor_parallel_size": tp, "precision": "bfloat16", "max_model_len": 4096} | section
    policy["generation"] = {"backend": "vllm", "vllm_cfg": {"gpu_memory_utilization": 0.5} | section}
    return engine_memory(policy, QWEN2)


@pytest.mark.parametrize(("tp", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_an_engine_holds_its_part_of_the_weights_and_of_each_tokens_keys_and_values(tp, heads):
    found = engine(tp)
    assert found.weights_bytes == 2 * 1_543_714_304 // tp  # the policy's own split does not count
    assert found.kv_bytes_per_token == 2 * 28 * heads * 128 * 2
    assert found.sequence_bytes == 4096 * found.kv_bytes_per_token


def test_other_engines_are_not_planned():
    policy = policy_without_model()
    assert engine_memory(policy, QWEN2) is None
    policy["generation"] = {"backend": "transformers"}
    assert engine_memory(policy, QWEN2) is None


def test_the_longest_sequence_has_to_fit_beside_the_weights():
    check_longest_sequence_fits(engine(1), 8 * GIB)
    with pytest.raises(ValueError, match=r"0\.5, which is 2\.50 .* take 2\.88 GiB .* \(4096\) tokens 0\.109 GiB"):
        check_longest_sequence_fits(engine(1), 5 * GIB)
