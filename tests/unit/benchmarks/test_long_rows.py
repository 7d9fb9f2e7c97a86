"""Tests the benchmark of long rows, on a tiny model without a GPU."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import long_rows
import pytest
from long_row_steps import measure
from long_rows import Case
from measuring import planned_gib

ROOT = Path(__file__).parents[3]
GPU_ONLY = {"peak_gib", "reserved_gib", "driver_peak_gib", "mfu", "kernels_s", "exposed_s", "logprob_peak_gib"}
OF_GRPO = {"logprob_s", "reference_s"}


def measured(case):
    return long_rows.row_of(case, partial(measure, case, case.config(has_gpus=False), num_steps=1))


@pytest.mark.parametrize(("way", "algorithm"), [("ours_attention_kept", "grpo"), ("modules", "sft")])
def test_a_row_has_every_column(way, algorithm):
    row = measured(Case("tiny", 64, way, algorithm))
    assert set(row) == {*long_rows.CASE, *long_rows.COLUMNS}
    absent = GPU_ONLY | {"why"} | (set() if algorithm == "grpo" else OF_GRPO)
    assert {name for name, value in row.items() if value is None} == absent
    assert (row["model"], row["tokens"], row["way"], row["fits"], row["steps"]) == ("tiny", 64, way, True, 1)
    assert row["step_s"] > 0
    assert row["host_gib"] > 0  # optimizer state is streamed


def test_the_plan_is_near_the_peaks_that_were_measured():
    rows = [
        row for row in json.loads((ROOT / "docs" / "results" / "long_rows.json").read_text())["rows"] if row["fits"]
    ]
    assert len(rows) >= 9
    roomy = SimpleNamespace(hostname="roomy", available_bytes=1 << 40, cgroup_free_bytes=None, memlock_bytes=None)
    for row in rows:
        case = Case(row["model"], row["tokens"], row["way"], row["algorithm"])
        planned = planned_gib(case.algorithm, case.config(has_gpus=True), roomy)
        assert 0.985 <= planned / row["peak_gib"] <= 1.06, case
