"""Tests whether the policy is built beside vLLM: the decision, and the line that reports it."""

import copy

import pytest

from nemo_offload_rl.config import RecipeError, load
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.run.engine_build import with_engine_build
from nemo_offload_rl.run.gpu_sizes import fitted_to_gpus

RECIPE = "benchmarks/recipes/grpo_1_5B_random.yaml"
KEY = "policy.generation.vllm_cfg.build_beside_policy"
BYTES = "++policy.generation.vllm_kwargs.kv_cache_memory_bytes"


def decided(gpu_gib, *overrides):
    config = load(RECIPE, ["policy.generation.backend=vllm", *overrides]).config
    before = copy.deepcopy(config)
    found, lines = with_engine_build(config, "grpo", gpu_gib and int(gpu_gib * GIB))
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
def test_it_is_left_open_where_vllm_measures_or_the_gpus_are_not_known(gpu_gib, overrides):
    assert decided(gpu_gib, *overrides) == ("auto", [])


def test_other_engines_are_left_as_they_are():
    config = load(RECIPE, ["policy.generation.backend=transformers"]).config
    assert with_engine_build(config, "grpo", 140 * GIB) == (config, [])


def test_engines_on_gpus_of_their_own_are_left_as_they_are():
    apart = ["++policy.generation.colocated.enabled=false", "++policy.generation.colocated.resources.gpus_per_node=1"]
    assert decided(140, *apart, "cluster.gpus_per_node=2", f"{BYTES}={60 * GIB}") == ("auto", [])


def test_the_recipe_can_have_the_policy_wait_but_not_have_it_built_where_there_is_no_room():
    assert decided(140, f"{BYTES}={60 * GIB}", f"++{KEY}=false") == (False, [])
    with pytest.raises(RecipeError, match="build_beside_policy: must be 'auto' or False; found true"):
        decided(140, f"++{KEY}=true")


def test_it_follows_the_kv_cache_that_the_plan_gives():
    config = load(RECIPE, ["policy.generation.backend=vllm"]).config
    found, lines = fitted_to_gpus(config, "grpo", 139 * GIB)
    assert found["policy"]["generation"]["vllm_cfg"]["build_beside_policy"] is True
    assert any("are built at the same time" in line for line in lines)
