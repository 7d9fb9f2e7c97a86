"""Tests the benchmark of asynchronous checkpoints, on a tiny model without a GPU."""

import async_save
import pytest


def test_both_ways_are_measured_with_their_snapshot_and_what_was_written_beside_steps_is_exact(tmp_path):
    sizes = {}
    for state in async_save.STATES:
        rows = async_save.measure("tiny", state, 1, tmp_path / "checkpoints")
        assert [(row["state"], row["way"]) for row in rows] == [
            (state, "beside"),
            (state, "at once"),
            (state, "beside"),
        ]
        first, _, last = rows
        assert first["turn"] == 0
        assert last["is_exact"] is True
        for row in rows:
            assert row["exposed_s"] > 0 and row["step_s"] > 0 and row["gb"] > 0
        assert last["exposed_s"] == pytest.approx(last["start_s"] + last["finish_s"], abs=1e-3)
        assert last["num_steps"] >= 1
        assert last["snapshot_gb"] == first["snapshot_gb"]
        sizes[state] = last["snapshot_gb"], last["gb"]
    # In fp32 a save has the weights twice, as the model's and as masters, and two moments. The snapshot of resident
    # state has all four; offloaded state is read from its host memory, and masters are the weights.
    resident, leaves = sizes["resident"][0], sizes["leaves"][0]
    assert leaves == pytest.approx(resident / 2, rel=0.1)
    assert resident == pytest.approx(sizes["resident"][1], rel=0.2)
