"""Tests which parameters and optimizer state stay on the GPU beside vLLM."""

import copy

import pytest
from support.machine import planner_of

from nemo_offload_rl.config import load
from nemo_offload_rl.plan.colocation import with_resident_state
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.residency.table import Phase, Placement, Target

RECIPE = "benchmarks/recipes/grpo_1_5B_random.yaml"  # 2.88 GiB of parameters


def where_params_are(gpu_gib, *overrides, backend="vllm"):
    config = load(RECIPE, [f"policy.generation.backend={backend}", *overrides]).config
    before = copy.deepcopy(config)
    found, lines = with_resident_state(config, planner_of(config, gpu_gib))
    assert config == before
    return settings(found["policy"]).table[Phase.GENERATE][Target.PARAMS], lines


def test_they_stay_where_they_fit_beside_vllm_and_the_process():
    placement, lines = where_params_are(12.3)  # 40% of it is 4.92 GiB
    assert placement is Placement.GPU
    assert lines == [
        "the policy's parameters, 2.88 GiB a rank, stay on the GPU during generation, since they fit there "
        "together with vLLM; policy.residency.table.generate.params=host offloads them"
    ]
    assert where_params_are(12.1) == (Placement.HOST, [])
    auto = "++policy.residency.table.generate.params=auto"
    assert where_params_are(12.3, auto)[0] is Placement.GPU
    assert where_params_are(12.1, auto) == (Placement.HOST, [])
    assert where_params_are(80, auto, backend="transformers") == (Placement.HOST, [])


AUTO_STATE = "++policy.residency.table.generate.optimizer_state=auto"


def where_state_is(gpu_gib, *overrides):
    config = load(RECIPE, ["policy.generation.backend=vllm", *overrides]).config
    before = copy.deepcopy(config)
    found, lines = with_resident_state(config, planner_of(config, gpu_gib))
    assert config == before
    table = settings(found["policy"]).table
    return table[Phase.REFIT][Target.OPTIMIZER_STATE], table[Phase.GENERATE][Target.OPTIMIZER_STATE], lines[1:]


def test_optimizer_state_stays_where_it_fits_beside_vllm_too():
    stays = [
        "the policy's optimizer state, 14.38 GiB a rank, stays on the GPU during generation, since it fits there "
        "together with vLLM; policy.residency.table.generate.optimizer_state=host offloads it"
    ]
    assert where_state_is(60, AUTO_STATE) == (Placement.UNCHANGED, Placement.UNCHANGED, stays)
    assert where_state_is(60, "policy.residency=auto") == (Placement.UNCHANGED, Placement.UNCHANGED, stays)
    leaves = (Placement.HOST, Placement.HOST, [])
    assert where_state_is(30, AUTO_STATE) == leaves  # vLLM has 14.6 GiB, and 19.3 would stay
    assert where_state_is(60) == (Placement.UNCHANGED, Placement.UNCHANGED, stays)  # the recipe has no such key
    assert where_state_is(30) == leaves
    assert where_state_is(60, "policy.offload_optimizer_for_refit=true") == leaves
    assert where_state_is(60, "++policy.residency.table.refit.optimizer_state=host")[0] is Placement.HOST
    assert where_state_is(60, AUTO_STATE, "++policy.residency.table.train.optimizer_state=streamed") == leaves


def test_a_refit_must_find_room_beside_what_stays():
    big = "policy.refit_buffer_size_gb=40"
    small = "policy.generation.vllm_cfg.gpu_memory_utilization=0.05"
    assert where_state_is(60, AUTO_STATE)[0] is Placement.UNCHANGED
    assert where_state_is(22.5, AUTO_STATE, small, big)[0] is Placement.HOST


@pytest.mark.parametrize(
    ("gpu_gib", "overrides", "backend"),
    [
        (80, ["++policy.residency.table.generate.params=host"], "vllm"),
        (80, [], "transformers"),
        (None, [], "vllm"),
    ],
    ids=["the recipe says so", "another engine", "an unknown GPU"],
)
def test_they_leave_otherwise(gpu_gib, overrides, backend):
    assert where_params_are(gpu_gib, *overrides, backend=backend) == (Placement.HOST, [])
