"""Tests what policy and engine keep of the GPU on which one generates while the other trains."""

import pytest
import yaml
from support.machine import planner_of, resolved_for

from nemo_offload_rl.config import load
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.decisions import Machine, check_fits
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.shared_gpu import phase_bytes
from nemo_offload_rl.residency.table import Phase, Placement, Target

RECIPE = "benchmarks/recipes/grpo_1_5B_random.yaml"
AHEAD = ["grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"]
VLLM = [*AHEAD, "policy.generation.backend=vllm"]
ROWS = [f"policy.sequence_packing.{key}=8192" for key in ("train_mb_tokens", "logprob_mb_tokens")]


def resolved(gpu_gib, *overrides):
    return resolved_for(load(RECIPE, [*overrides]).config, gpu_gib)


def cache_of(found):
    return found.config["policy"]["generation"]["vllm_kwargs"]["kv_cache_memory_bytes"]


def most_bytes(found, gpu_gib):
    planner = planner_of(found.config, gpu_gib)
    return max(phase_bytes(found.config, planner, found.run, planner.gpu_bytes).values())


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_neither_leaves_the_gpu_for_the_other(backend):
    policy = resolved(140, *AHEAD, *ROWS, f"policy.generation.backend={backend}").config["policy"]
    assert policy["residency"]["generation_weights"] == "gpu"
    yaml.safe_dump(policy["residency"])  # as checkpoints and run.json have it
    table = settings(policy).table
    for phase in (Phase.REFIT, Phase.GENERATE):
        assert table[phase][Target.PARAMS] is Placement.GPU
        assert table[phase][Target.GRADS] is table[phase][Target.OPTIMIZER_STATE] is Placement.UNCHANGED


def test_the_kv_cache_gets_what_training_leaves():
    roomy = resolved(140, *VLLM, *ROWS)
    needed = most_bytes(roomy, 140) / GIB
    tight = resolved(needed - 3, *VLLM, *ROWS)
    assert cache_of(roomy) > cache_of(tight) > 0
    assert needed - 3.1 < most_bytes(tight, needed - 3) / GIB <= needed - 3
    assert any("what training leaves of the GPU at the same time" in line for line in tight.lines)
    # One after the other, the engine may have all of it.
    assert cache_of(resolved(needed - 3, *VLLM[1:], *ROWS)) == cache_of(roomy)


def test_rows_that_are_left_open_get_what_the_kv_cache_leaves():
    packing = resolved(80, *VLLM).config["policy"]["sequence_packing"]
    sequential = resolved(80, *VLLM[1:]).config["policy"]["sequence_packing"]
    assert 512 < packing["train_mb_tokens"] < sequential["train_mb_tokens"]


@pytest.mark.parametrize("rows", [[], ROWS])
def test_a_gpu_without_room_for_both_is_refused_with_what_is_missing(rows):
    with pytest.raises(ValueError, match=r"where 30.00 GiB lack [\d.]+ GiB for both"):
        resolved(30, *VLLM, *rows)


def test_a_kv_cache_of_the_recipe_is_refused_with_the_size_that_fits():
    own = "++policy.generation.vllm_kwargs.kv_cache_memory_bytes="
    with pytest.raises(ValueError, match=r"room for \d+; set it to that or less") as caught:
        resolved(80, *VLLM, *ROWS, f"{own}{60 * GIB}")
    fits = int(str(caught.value).split("room for ")[1].split(";")[0])
    assert cache_of(resolved(80, *VLLM, *ROWS, f"{own}{fits}")) == fits


def test_cells_of_the_recipe_stay():
    streamed = ["++policy.residency.table.train.optimizer_state=streamed"]
    moved = ["++policy.residency.table.generate.params=host", "policy.offload_optimizer_for_refit=true"]
    table = settings(resolved(140, *VLLM, *ROWS, *moved).config["policy"]).table
    assert table[Phase.GENERATE][Target.PARAMS] is Placement.HOST
    assert table[Phase.REFIT][Target.OPTIMIZER_STATE] is Placement.HOST
    with_window, whole = resolved(140, *VLLM, *ROWS, *streamed), resolved(140, *VLLM, *ROWS)
    assert most_bytes(with_window, 140) < most_bytes(whole, 140) - 5 * GIB


def test_engines_on_gpus_of_their_own_are_as_ever():
    apart = ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1"]
    found = resolved(80, *VLLM, *ROWS, *apart, "cluster.gpus_per_node=2")
    assert found.config["policy"]["residency"]["generation_weights"] is None
    assert "kv_cache_memory_bytes" not in found.config["policy"]["generation"]["vllm_kwargs"]


def test_a_run_that_fits_passes_the_check_before_it_starts():
    found = resolved(80, *VLLM, *ROWS)
    check_fits(found, Machine(has_gpus=True, gpu_bytes=80 * GIB))
