"""The benchmark of checkpoints beside the run, on a tiny model without a GPU."""

import async_save
import pytest


@pytest.mark.parametrize("scale", async_save.SCALES.values(), ids=async_save.SCALES)
def test_the_policy_takes_the_rows_of_every_scale(scale):
    assert scale.batch()["input_ids"].shape == (scale.num_rows, scale.row_tokens)
    assert scale.row_tokens <= scale.policy()["max_total_sequence_length"]


def test_both_ways_are_measured_and_what_was_written_beside_a_step_is_exact(tmp_path):
    *rows, exact = async_save.measure("tiny", 1, tmp_path / "checkpoints")
    assert [row["way"] for row in rows] == ["at once", "beside"] * 2
    assert exact["is_exact"] is True
    for row in rows:
        assert row["exposed_s"] > 0 and row["step_s"] > 0 and row["gb"] > 0
    beside = rows[-1]
    assert beside["exposed_s"] <= beside["start_s"] + beside["finish_s"] + 1e-3
    assert beside["num_steps"] >= 1
