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


def test_a_way_that_made_nothing_is_equal_to_nothing():
    found = cpu_optimizer.compared([({"way": "a"}, []), ({"way": "b"}, [1, 2]), ({"way": "c"}, [1, 3])])
    assert [row["bit_equal"] for row in found] == [None, True, False]
