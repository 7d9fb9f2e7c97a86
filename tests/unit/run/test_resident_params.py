"""Parameters that stay on the GPU beside vLLM."""

import copy
from types import SimpleNamespace

import pytest

from nemo_offload_rl.config import load
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.residency.table import Phase, Placement, Target
from nemo_offload_rl.run import resident_params
from nemo_offload_rl.run.resident_params import smallest_gpu_bytes, with_resident_params_here

RECIPE = "benchmarks/recipes/grpo_1_5B_random.yaml"  # 2.88 GiB of parameters


def where_params_are(gpu_gib, *overrides, backend="vllm"):
    config = load(RECIPE, [f"policy.generation.backend={backend}", *overrides]).config
    before = copy.deepcopy(config)
    found, lines = with_resident_params_here(config, "grpo", gpu_gib and int(gpu_gib * GIB))
    assert config == before
    return settings(found["policy"]).table[Phase.GENERATE][Target.PARAMS], lines


def test_they_stay_where_they_fit_beside_vllm_and_the_process():
    placement, lines = where_params_are(12.3)  # 40% of it is 4.92 GiB
    assert placement is Placement.GPU
    assert lines == [
        "the policy's parameters, 2.88 GiB a rank, stay on the GPU during generation, since they fit there beside "
        "vLLM; policy.residency.table.generate.params=host moves them"
    ]
    assert where_params_are(12.1) == (Placement.HOST, [])
    auto = "++policy.residency.table.generate.params=auto"
    assert where_params_are(12.3, auto)[0] is Placement.GPU
    assert where_params_are(12.1, auto) == (Placement.HOST, [])
    assert where_params_are(80, auto, backend="transformers") == (Placement.HOST, [])


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


def test_the_smallest_gpu_counts_where_all_ranks_are_on_this_machine(monkeypatch):
    gpus = [SimpleNamespace(total_bytes=8), SimpleNamespace(total_bytes=6)]
    monkeypatch.setattr(resident_params, "gpu_facts", lambda: gpus)
    monkeypatch.setattr(resident_params.ray.util, "get_node_ip_address", lambda: "10.0.0.1")

    def smallest(has_gpus=True, num_nodes=1, address="10.0.0.1"):
        nodes = [SimpleNamespace(address=address)] * num_nodes
        return smallest_gpu_bytes(SimpleNamespace(has_gpus=has_gpus, num_nodes=num_nodes, nodes=nodes))

    assert smallest() == 6
    assert smallest(num_nodes=2) is None
    assert smallest(has_gpus=False) is None
    assert smallest(address="10.0.0.2") is None  # the one node of a Ray cluster that the driver is not on
    gpus.append(SimpleNamespace(total_bytes=None))
    assert smallest() is None
