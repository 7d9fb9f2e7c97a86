"""Tests the benchmark of long rows, on a tiny model without a GPU, and the plan against its results."""

import json
from functools import partial

import long_rows
import pytest
from long_row_steps import measure
from measuring import planned_gib

from tests.unit.benchmarks.test_context_parallel import RESULTS, ROOMY


@pytest.mark.parametrize(("way", "algorithm"), [("ours_attention_kept", "grpo"), ("modules", "sft")])
def test_a_row_has_every_column(way, algorithm):
    case = long_rows.Case("tiny", 64, way, algorithm)
    row = long_rows.row_of(case, partial(measure, case, case.config(has_gpus=False), num_steps=1))
    assert set(row) == {*long_rows.CASE, *long_rows.COLUMNS}
    assert (row["model"], row["tokens"], row["way"], row["fits"], row["steps"]) == ("tiny", 64, way, True, 1)
    assert (row["logprob_s"] is None) == (algorithm == "sft")
    assert min(row["step_s"], row["host_gib"]) > 0  # optimizer state is streamed


def test_the_plan_is_near_the_peaks_that_were_measured():
    rows = [row for row in json.loads((RESULTS / "long_rows.json").read_text())["rows"] if row["fits"]]
    assert len(rows) >= 9
    for row in rows:
        case = long_rows.Case(row["model"], row["tokens"], row["way"], row["algorithm"])
        planned = planned_gib(case.algorithm, case.config(has_gpus=True), ROOMY)
        assert 0.985 <= planned / row["peak_gib"] <= 1.06, case
