"""Tests the benchmark of ways to keep optimizer state off the GPU, on a tiny model without one."""

import cpu_optimizer
import pytest
from optimizer_ways.measure import measure
from optimizer_ways.recipe import planned_run, policy_of
from optimizer_ways.ways import CASES, WAYS

from nemo_offload_rl.plan import cpu_optimizer as planned_cpu_optimizer
from nemo_offload_rl.plan.model_facts import shard_facts
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import make_plan

N = 1_543_714_304
FIELDS = {
    "case", "way", "fraction", "overlap", "step_ms", "optimizer_ms", "times_streamed", "exposed_ms", "peak_gpu_mib",
    "window_mib", "host_mib", "peak_host_mib", "share_of_link", "bit_equal", "tokens_per_s", "logprob_ms",
    "logprob_peak_gpu_mib", "largest_mbs",
}  # fmt: skip


def measured(case, way):
    """Returns every row that measuring a way saves, in order."""
    saved = []
    measure(case, WAYS[way], saved.append)
    return saved


def test_streamed_state_is_measured_beside_resident_state_and_equals_it():
    case = cpu_optimizer.scaled(CASES["1.5B, 12 bytes a parameter"], "tiny")
    found = [saved for way in ("resident", "streamed") for saved in measured(case, way)]
    resident, streamed = cpu_optimizer.compared(found)
    assert set(resident) == set(streamed) == FIELDS
    assert (resident["way"], resident["window_mib"], resident["host_mib"]) == ("resident", 0, 0)
    assert (streamed["way"], streamed["window_mib"]) == ("streamed", 512)
    assert streamed["host_mib"] > 0
    assert (resident["bit_equal"], streamed["bit_equal"]) == (None, True)
    assert (streamed["times_streamed"], resident["largest_mbs"]) == (1, None)
    for row in (resident, streamed):
        assert min(row["optimizer_ms"], row["tokens_per_s"], row["logprob_ms"]) > 0
        assert row["peak_host_mib"] > 100  # Python and torch take that much


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_every_case_is_a_recipe_in_each_of_its_ways(case):
    for way in case.ways:
        plan = settings(policy_of(case, WAYS[way], has_gpus=True))
        assert plan.streams_optimizer_state == (way == "streamed")


@pytest.mark.parametrize(("case", "size"), [("1.5B, 10 bytes a parameter", 10), ("1.5B, 12 bytes a parameter", 12)])
def test_host_memory_is_that_of_the_way_alone(case, size):
    expected = {"resident": 0, "streamed": size * N, "CPU 0.5": 8 * N, "CPU 0.5, overlap": 8 * N}
    expected |= {"CPU 1": 16 * N, "CPU 1, overlap": 16 * N}
    for way in CASES[case].ways:
        policy = policy_of(CASES[case], WAYS[way], has_gpus=True)
        facts = shard_facts(CASES[case].hf_config, policy, world_size=1, has_reference=False)
        [rank] = make_plan(policy, facts).ranks
        on_cpu = planned_cpu_optimizer.host_bytes(policy, rank.facts)
        assert sum(on_cpu.values()) + rank.total_host_bytes == expected[way]


def test_random_weights_of_8b_are_made_on_an_h100():
    """mcore/build.py creates a model on the GPU only if it takes at most a quarter of the GPU."""
    [rank] = planned_run(CASES["8B"], []).plan.ranks
    assert rank.facts.num_params == 8_190_735_360
    assert CASES["8B"].hf_config["dtype"] == "bfloat16"
    assert 2 * rank.facts.num_params < 78 * 2**30 / 4


def test_the_cpu_optimizer_is_tried_with_both_fractions_and_overlap():
    found = set()
    case = CASES["1.5B, 10 bytes a parameter"]
    for way in case.ways:
        optimizer = policy_of(case, WAYS[way], has_gpus=True)["megatron_cfg"]["optimizer"]
        if optimizer["optimizer_cpu_offload"]:
            found.add((optimizer["optimizer_offload_fraction"], optimizer["overlap_cpu_optimizer_d2h_h2d"]))
    assert found == {(0.5, False), (0.5, True), (1.0, False), (1.0, True)}
