from functools import partial

import pytest

from nemo_offload_rl.worker import environment
from nemo_offload_rl.worker.environment import worker_environment

SIZES = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
library_environment = partial(environment.library_environment, refit_follows=False)
RECIPE = {f"{kind}_parallel_size": 1 for kind in SIZES} | {"sequence_parallel": False, "env_vars": None}
FUSED_EXPERTS = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"


def test_hardware_queues_are_limited_only_where_communication_overlaps():
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert library_environment(RECIPE) == {"NVTE_CPU_OFFLOAD_V1": "1"}
    for overlapping in ({"tensor_model_parallel_size": 2}, {"sequence_parallel": True}):
        assert library_environment(RECIPE | overlapping)[name] == "1"
    own = {"tensor_model_parallel_size": 2, "env_vars": {name: "8"}}
    assert library_environment(RECIPE | own)[name] == "8"


@pytest.mark.parametrize("kind", SIZES)
def test_nccl_registers_no_graphs_memory_where_ranks_exchange_weights_in_refits(kind):
    name, recipe = "NCCL_GRAPH_REGISTER", RECIPE | {f"{kind}_parallel_size": 2}
    assert library_environment(recipe, refit_follows=True)[name] == "0"
    assert name not in library_environment(recipe) | library_environment(RECIPE, refit_follows=True)
    assert library_environment(recipe | {"env_vars": {name: 1}}, refit_follows=True)[name] == "1"


@pytest.mark.parametrize("fused", [True, False, None])
def test_fused_experts_are_switched_on_with_the_op_fuser(fused):
    recipe = RECIPE | {"use_transformer_engine_op_fuser": fused}
    assert (FUSED_EXPERTS in library_environment(recipe)) is bool(fused)
    assert library_environment(recipe | {"env_vars": {FUSED_EXPERTS: "0"}})[FUSED_EXPERTS] == "0"
    if fused:
        assert library_environment(recipe)[FUSED_EXPERTS] == "1"


def test_a_rank_has_its_place_and_its_threads_beside_what_libraries_read():
    recipe = RECIPE | {"use_transformer_engine_op_fuser": True, "env_vars": {"RANK": "5", "TOY_VARIABLE": "1"}}
    assert worker_environment(recipe, rank=1, world_size=2, threads=3, refit_follows=False) == {
        "NVTE_CPU_OFFLOAD_V1": "1", FUSED_EXPERTS: "1", "TOY_VARIABLE": "1", "OMP_NUM_THREADS": "3",
        "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
    }  # fmt: skip
    own = RECIPE | {"env_vars": {"OMP_NUM_THREADS": "7"}}
    assert worker_environment(own, rank=0, world_size=1, threads=3, refit_follows=False)["OMP_NUM_THREADS"] == "7"
