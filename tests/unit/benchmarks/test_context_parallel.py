"""Tests the benchmark of context parallelism."""

import json
from pathlib import Path
from types import SimpleNamespace

import context_parallel
import pytest
from context_parallel import Case
from measuring import planned_gib

RESULT = Path(__file__).parents[3] / "docs" / "results" / "context_parallel.json"
ROOMY = SimpleNamespace(hostname="roomy", available_bytes=1 << 40, cgroup_free_bytes=None, memlock_bytes=None)


def test_a_step_is_as_long_as_its_slowest_rank_and_is_compared_with_the_first_case():
    case = Case("tiny", tokens=100, rows=2, way="ours", cp=2, gpus=4)
    ranks = [
        {"seconds": [9, 1, 3], "losses": [2.0, 1.0], "peak_gib": 5.0, "planned_gib": 6.0},
        {"seconds": [9, 2, 1], "losses": [2.0, 1.0], "peak_gib": 7.0, "planned_gib": 6.0},
    ]
    row = context_parallel.row_of(case, ranks, [2.0, 1.25])
    assert (row["dp"], row["step_s"], row["tokens_per_s"], row["peak_gib"]) == (2, 2.5, 80, 7.0)
    assert row["largest_difference"] == pytest.approx(0.2)


def test_a_collective_is_exposed_while_no_other_kernel_runs():
    kernels = [
        ("ncclAllReduce", 0.0, 4.0),
        ("gemm", 1.0, 2.0),
        ("gemm", 1.5, 3.0),
        ("nccl", 3.5, 5.0),
        ("Memcpy", 0, 9),
    ]
    assert context_parallel.collectives(kernels) == {"collectives_s": 5.0, "exposed_s": 3.0}


def test_the_plan_is_near_the_peaks_that_were_measured():
    rows = json.loads(RESULT.read_text())["rows"]
    assert {(row["cp"], row["tokens"]) for row in rows} >= {(2, 131072), (2, 1048576), (2, 262144)}
    for row in rows:
        case = Case(**{name: row[name] for name in context_parallel.CASE if name in row})
        planned = planned_gib("sft", context_parallel.config_of(case, has_gpus=True), ROOMY)
        # Short rows take less than a whole chunk of logits, which is planned.
        assert 0.99 <= planned / row["peak_gib"] <= (1.17 if row["tokens"] < 16384 else 1.04), case
