"""The benchmark of ways to have optimizer state off the GPU, on a tiny model without one."""

import cpu_optimizer
import pytest
from optimizer_ways.measure import measure, policy_of
from optimizer_ways.ways import CASES, WAYS

from nemo_offload_rl.plan.plan import settings

FIELDS = {
    "case", "way", "fraction", "overlap", "step_ms", "optimizer_ms", "exposed_ms", "peak_gpu_mib", "window_mib",
    "host_mib", "share_of_link", "bit_equal", "tokens_per_s",
}  # fmt: skip


def test_streamed_state_is_measured_beside_resident_state_and_equals_it():
    case = cpu_optimizer.scaled(CASES["1.5B, 12 bytes a parameter"], "tiny")
    resident, streamed = cpu_optimizer.compared([measure(case, WAYS[name]) for name in ("resident", "streamed")])
    assert set(resident) == set(streamed) == FIELDS
    assert (resident["way"], resident["window_mib"]) == ("resident", 0)
    assert (streamed["way"], streamed["window_mib"]) == ("streamed", 512)
    assert streamed["bit_equal"] is True
    assert streamed["optimizer_ms"] > 0
    assert streamed["tokens_per_s"] > 0


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_every_case_is_a_recipe_in_each_of_its_ways(case):
    for way in case.ways:
        plan = settings(policy_of(case, WAYS[way], has_gpus=True))
        assert plan.streams_optimizer_state == (way == "streamed")


def test_the_cpu_optimizer_is_tried_with_both_fractions_and_overlap():
    found = set()
    case = CASES["1.5B, 10 bytes a parameter"]
    for way in case.ways:
        optimizer = policy_of(case, WAYS[way], has_gpus=True)["megatron_cfg"]["optimizer"]
        if optimizer["optimizer_cpu_offload"]:
            found.add((optimizer["optimizer_offload_fraction"], optimizer["overlap_cpu_optimizer_d2h_h2d"]))
    assert found == {(0.5, False), (0.5, True), (1.0, False), (1.0, True)}


def test_ways_are_compared_with_the_first_that_steps_as_much_on_the_cpu():
    made = [(0.0, []), (0.0, [1, 2]), (0.0, [1, 3]), (0.5, [1, 4]), (0.5, [1, 4])]
    found = cpu_optimizer.compared([({"fraction": fraction}, values) for fraction, values in made])
    assert [row["bit_equal"] for row in found] == [None, True, False, True, True]
