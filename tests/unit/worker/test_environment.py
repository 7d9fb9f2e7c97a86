from functools import partial

import pytest

from nemo_offload_rl.config.megatron import ALLOCATOR_SETTINGS
from nemo_offload_rl.worker import environment
from nemo_offload_rl.worker.environment import worker_environment
from nemo_offload_rl.worker.rank_metrics import worst_of_ranks

SIZES = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
library_environment = partial(environment.library_environment, refit_follows=False)
RECIPE = {f"{kind}_parallel_size": 1 for kind in SIZES}
RECIPE |= {"sequence_parallel": False, "env_vars": None, "cuda_graph_impl": "none"}
FUSED_EXPERTS = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
GROWING = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture(autouse=True)
def no_settings_of_the_allocator(monkeypatch):
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)


def test_hardware_queues_are_limited_only_where_communication_overlaps():
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert library_environment(RECIPE) == {"NVTE_CPU_OFFLOAD_V1": "1"} | GROWING
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


@pytest.mark.parametrize("name", ALLOCATOR_SETTINGS)
def test_segments_grow_unless_graphs_are_captured_or_the_allocator_has_other_settings(name, monkeypatch):
    other = {name: "max_split_size_mb:512"}
    assert GROWING.items() <= library_environment(RECIPE).items()
    captures = library_environment(RECIPE | {"cuda_graph_impl": "transformer_engine"})
    assert not captures.keys() & set(ALLOCATOR_SETTINGS)
    assert library_environment(RECIPE | {"env_vars": other}) == captures | other
    monkeypatch.setenv(name, other[name])
    assert library_environment(RECIPE) == captures | other


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
    } | GROWING  # fmt: skip
    own = RECIPE | {"env_vars": {"OMP_NUM_THREADS": "7"}}
    assert worker_environment(own, rank=0, world_size=1, threads=3, refit_follows=False)["OMP_NUM_THREADS"] == "7"


MOVED = "refit/optimizer_state"
# Of each quantity the values of a fast and a slow rank.
QUANTITIES = {
    f"{MOVED}/gb": (6.0, 6.5), f"{MOVED}/copy_s": (0.12, 0.26), f"{MOVED}/exposed_s": (0.01, 0.2),
    f"{MOVED}/hidden_s": (0.11, 0.06), f"{MOVED}/gb_per_s": (50.0, 25.0), f"{MOVED}/share_of_link": (0.98, 0.5),
    "refit/enter_s": (0.02, 0.21), "refit/gpu_free_before_gib": (40.0, 38.0), "refit/gpu_free_after_gib": (46.0, 44.0),
    "refit/gpu_ranges_after_gib": (3.0, 4.0), "host_rss_gib": (9.0, 10.0), "host_pinned_gib": (7.0, 8.0),
}  # fmt: skip
FAST, SLOW = ({name: values[rank] for name, values in QUANTITIES.items()} for rank in range(2))


@pytest.mark.parametrize("ranks", [[FAST, SLOW], [SLOW, FAST], [FAST, SLOW, FAST], [SLOW]])
def test_the_worst_rank_counts_whatever_the_quantity(ranks):
    assert worst_of_ranks(ranks) == SLOW


def test_each_quantity_is_judged_alone():
    mixed = FAST | {"refit/optimizer_state/exposed_s": 0.5, "refit/gpu_free_after_gib": 1.0}
    assert worst_of_ranks([SLOW, mixed]) == SLOW | {name: mixed[name] for name in mixed if mixed[name] != FAST[name]}


def test_what_only_some_ranks_moved_is_kept():
    moved = {"generate/params/gb": 2.0}
    assert worst_of_ranks([{"host_rss_gib": 1.0}, moved | {"host_rss_gib": 0.5}]) == moved | {"host_rss_gib": 1.0}
    assert worst_of_ranks([{}, {}]) == {}
