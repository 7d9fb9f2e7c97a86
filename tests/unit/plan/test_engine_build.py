"""Tests whether the policy is built beside vLLM: its memory, the decision, and the line that reports it."""

import copy
from dataclasses import replace

import pytest
from support.machine import planner_of, resolved_for
from support.shard_facts import FACTS
from support.tiny import policy_without_model

from nemo_offload_rl.config import RecipeError, load
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.colocation import with_engine_build
from nemo_offload_rl.plan.generation import EngineMemory
from nemo_offload_rl.plan.planner import PlannedRun, Planner, make_plan
from nemo_offload_rl.plan.shared_gpu import policy_build_bytes, why_not_at_once

PLAN = make_plan(policy_without_model(), [FACTS])


def test_all_state_counts_and_the_largest_target_twice():
    assert policy_build_bytes(PLAN) == (2 + 4 + 2 * 10 + 3) * GIB


def test_streamed_state_is_never_there():
    table = {"train": {"optimizer_state": "streamed"}}
    policy = policy_without_model()
    policy["residency"] |= {"table": table, "stream_window_mib": 1024}
    plan = make_plan(policy, [FACTS])
    assert policy_build_bytes(plan) == (2 + 2 * 4 + 1 + 3) * GIB


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
    run, planner = PlannedRun(PLAN, [], found), Planner({}, "grpo", gpu_gib * GIB)
    assert why_not_at_once(run, planner, gpu_gib * GIB) == (reason and reason + " GiB")


RECIPE = "benchmarks/recipes/grpo_1_5B_random.yaml"
KEY = "policy.generation.vllm_cfg.build_beside_policy"
BYTES = "++policy.generation.vllm_kwargs.kv_cache_memory_bytes"


def decided(gpu_gib, *overrides):
    config = load(RECIPE, ["policy.generation.backend=vllm", *overrides]).config
    before = copy.deepcopy(config)
    found, lines = with_engine_build(config, planner_of(config, gpu_gib))
    assert config == before
    return found["policy"]["generation"]["vllm_cfg"]["build_beside_policy"], lines


def test_both_are_built_at_once_where_they_fit():
    beside, [line] = decided(140, f"{BYTES}={60 * GIB}")
    assert beside is True
    assert line.startswith("the policy and vLLM are built at the same time, since the GPU has room for both; ")
    assert f"{KEY}=false builds the policy after vLLM" in line


def test_a_gpu_without_room_for_both_builds_the_policy_behind_vllm():
    beside, [line] = decided(140, f"{BYTES}={100 * GIB}")
    assert beside is False
    assert line.startswith("the policy is built after vLLM, not at the same time: both would take up to ")
    assert line.endswith(" of the GPU's 140.00 GiB")


@pytest.mark.parametrize(
    ("gpu_gib", "overrides"),
    [
        (140, []),  # vLLM measures
        (None, [f"{BYTES}={60 * GIB}"]),  # several nodes
    ],
)
def test_the_policy_waits_where_vllm_measures_or_the_gpus_are_not_known(gpu_gib, overrides):
    assert decided(gpu_gib, *overrides) == (False, [])


def test_other_engines_are_left_as_they_are():
    config = load(RECIPE, ["policy.generation.backend=transformers"]).config
    assert with_engine_build(config, planner_of(config, 140)) == (config, [])


def test_on_gpus_of_their_own_nothing_has_to_fit():
    apart = ["++policy.generation.colocated.enabled=false", "++policy.generation.colocated.resources.gpus_per_node=1"]
    assert decided(140, *apart, "cluster.gpus_per_node=2", f"{BYTES}={60 * GIB}") == (False, [])


def test_the_recipe_can_have_the_policy_wait_but_not_have_it_built_where_there_is_no_room():
    assert decided(140, f"{BYTES}={60 * GIB}", f"++{KEY}=false") == (False, [])
    with pytest.raises(RecipeError, match="build_beside_policy: must be 'auto' or False; found true"):
        decided(140, f"++{KEY}=true")


def test_it_follows_the_kv_cache_that_the_plan_gives():
    config = load(RECIPE, ["policy.generation.backend=vllm"]).config
    resolved = resolved_for(config, 139)
    assert resolved.config["policy"]["generation"]["vllm_cfg"]["build_beside_policy"] is True
    assert any("are built at the same time" in line for line in resolved.lines)
