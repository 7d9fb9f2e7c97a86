"""Tests the bytes of vLLM's KV cache, from the plan to the engine's arguments."""

import copy
from pathlib import Path

import pytest
import torch
from support.machine import planner_of

from nemo_offload_rl.config import load
from nemo_offload_rl.generation.vllm_arguments import engine_arguments
from nemo_offload_rl.generation.vllm_backend import explain_kv_cache_oom
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.colocation import with_kv_cache_bytes

RECIPE = "benchmarks/recipes/grpo_1_5B_random.yaml"


def given(gpu_gib, *overrides, backend="vllm"):
    behind = "++policy.generation.vllm_cfg.build_beside_policy=false"
    config = load(RECIPE, [f"policy.generation.backend={backend}", behind, *overrides]).config
    before = copy.deepcopy(config)
    found, lines = with_kv_cache_bytes(config, planner_of(config, gpu_gib))
    assert config == before
    return found["policy"], lines


LONG = ["policy.max_total_sequence_length=8192", "policy.sequence_packing.enabled=false"]


def test_an_engine_gets_it_in_bytes():
    policy, [line] = given(80, *LONG)
    nbytes = engine_arguments(policy, Path("/folder"))["kv_cache_memory_bytes"]
    share = policy["generation"]["vllm_cfg"]["gpu_memory_utilization"]
    assert 0 < nbytes < share * 80 * GIB - 2 * 1_543_714_304
    assert line.startswith(f"vLLM's KV cache has {nbytes / GIB:.2f} GiB of each GPU, ")
    assert "gpu_memory_utilization minus 2.88 GiB of weights" in line
    larger, _ = given(90, *LONG)
    grown = engine_arguments(larger, Path("/folder"))["kv_cache_memory_bytes"]
    assert grown - nbytes == pytest.approx(share * 10 * GIB, abs=1)


def test_it_is_no_larger_than_all_sequences_under_way_can_fill():
    policy, [line] = given(80)
    nbytes = engine_arguments(policy, Path("/folder"))["kv_cache_memory_bytes"]
    # 512 tokens and one more block of 16; keys and values of 28 layers, 2 heads of 128, in bfloat16.
    assert nbytes == (512 * (512 + 16) + 16) * 2 * 28 * 2 * 128 * 2
    assert "room for all 512 that vLLM runs at once (max_num_seqs)" in line
    fewer, _ = given(80, "++policy.generation.vllm_kwargs.max_num_seqs=64")
    assert engine_arguments(fewer, Path("/folder"))["kv_cache_memory_bytes"] == (64 * 528 + 16) * 28672


def test_the_recipes_own_wins():
    policy, lines = given(80, "++policy.generation.vllm_kwargs.kv_cache_memory_bytes=5000000000")
    assert engine_arguments(policy, Path("/folder"))["kv_cache_memory_bytes"] == 5_000_000_000
    assert lines == []


@pytest.mark.parametrize(("gpu_gib", "backend"), [(None, "vllm"), (80, "transformers")])
def test_nothing_is_given_otherwise(gpu_gib, backend):
    policy, lines = given(gpu_gib, backend=backend)
    assert "kv_cache_memory_bytes" not in policy["generation"].get("vllm_kwargs", {})
    assert lines == []


def test_too_small_a_share_is_an_error_and_no_tiny_cache():
    with pytest.raises(ValueError, match="activations and graphs an estimated"):
        given(8)


@pytest.mark.parametrize(("beside", "behind"), [(True, "set .*build_beside_policy to false, or "), (False, "")])
def test_memory_that_runs_out_while_an_engine_is_built_names_the_keys(beside, behind):
    found = pytest.raises(
        torch.OutOfMemoryError,
        match=rf"of 3\.00 GiB \(Tried to .*\); {behind}lower .*kv_cache_memory_bytes \(bytes of each",
    )
    with found, explain_kv_cache_oom({"kv_cache_memory_bytes": 3 * GIB}, beside_policy=beside):
        raise torch.OutOfMemoryError("Tried to allocate 4 GiB. GPU 0 has less")
