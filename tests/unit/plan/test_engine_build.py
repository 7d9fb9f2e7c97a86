"""Tests the GPU memory that a policy needs while it is built beside an engine."""

from dataclasses import replace

import pytest
from support.shard_facts import FACTS
from support.tiny import policy_without_model

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.engine_build import policy_build_bytes, why_not_at_once
from nemo_offload_rl.plan.generation import EngineMemory
from nemo_offload_rl.plan.planner import make_plan

PLAN = make_plan(policy_without_model(), [FACTS])


def test_all_state_counts_and_the_largest_target_twice():
    assert policy_build_bytes(PLAN, 40 * GIB, has_random_weights=False) == (2 + 4 + 2 * 10 + 3) * GIB


def test_random_weights_are_a_whole_model_beside_the_parameters():
    assert policy_build_bytes(PLAN, 40 * GIB, has_random_weights=True) == (2 + 4 + 2 * 10 + 3) * GIB
    assert policy_build_bytes(PLAN, 100 * GIB, has_random_weights=True) == (2 + 25 + 3) * GIB


def test_streamed_state_is_never_there():
    table = {"train": {"optimizer_state": "streamed"}}
    policy = policy_without_model()
    policy["residency"] |= {"table": table, "stream_window_mib": 1024}
    plan = make_plan(policy, [FACTS])
    assert policy_build_bytes(plan, 40 * GIB, has_random_weights=False) == (2 + 2 * 4 + 1 + 3) * GIB


def engine(cache_gib):
    return EngineMemory(
        weights_bytes=2 * GIB,
        kv_bytes_per_token=1,
        max_model_len=1,
        max_num_seqs=1,
        block_tokens=16,
        share=0.5,
        reserve_bytes=4 * GIB,
        refit_bytes=GIB,
        refit_graph_bytes=0,
        own_kv_cache_bytes=cache_gib * GIB,
    )


@pytest.mark.parametrize(
    ("cache_gib", "bucket_gib", "gpu_gib", "reason"),
    [
        (27, 1, 62, None),  # 29 of the policy, 33 of vLLM
        (27, 1, 61, "both would take up to 62.00 of the GPU's 61.00"),
        (27, 25, 62, None),  # in a refit the policy has 2 of parameters and 2 of its process
        (
            27,
            26,
            62,
            "the first refit, which runs before vLLM first sleeps, would take up to 63.00 of the GPU's 62.00",
        ),
    ],
)
def test_both_have_to_fit_while_they_are_built_and_in_the_first_refit(cache_gib, bucket_gib, gpu_gib, reason):
    found = replace(engine(cache_gib), refit_bytes=bucket_gib * GIB)
    assert why_not_at_once(PLAN, found, gpu_gib * GIB, has_random_weights=False) == (reason and reason + " GiB")
