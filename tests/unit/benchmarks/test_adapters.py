"""Tests the benchmark of other trainers' ways to move training state, on tiny models without a GPU."""

import adapters
import pytest
from adapter_ways.cases import CASES
from adapter_ways.measure import measure

FIELDS = {
    "case", "way", "gb", "tensors", "first_out_s", "first_back_s", "out_s", "out_waited_s", "back_s", "back_waited_s",
    "cycles", "share_of_link_out", "share_of_link_back", "left_gb", "pinned_over_moved", "host_over_moved",
    "addresses_kept", "state_bit_equal", "next_step_bit_equal",
}  # fmt: skip


@pytest.mark.parametrize("case", ["1.5B, 12 bytes a parameter", "experts, 10,000 tensors"])
def test_ways_with_the_engine_keep_addresses_state_and_the_next_step(case):
    ways = ["resident", "ours in megatron_core", "ours in nemo_rl"]
    rows = adapters.compared([measure(CASES[case].scaled("tiny"), way, cycles=1) for way in ways])
    for row, way in zip(rows, ways, strict=True):
        assert set(row) == FIELDS
        assert (row["case"], row["way"]) == (case, way)
        assert row["addresses_kept"] and row["state_bit_equal"] and row["next_step_bit_equal"]
    assert rows[0]["out_s"] < rows[1]["out_s"]
