"""Tests benchmarks/optimizer_offload.py at a small scale, without a GPU."""

import optimizer_offload
import pytest
import torch


@pytest.mark.parametrize("case", ["tensors", "optimizer state"])
def test_what_moves_comes_back_unchanged(case):
    cpu = torch.device("cpu")
    if case == "tensors":
        rows = optimizer_offload.tensors_of([1 << 20], cpu)
    else:
        rows = optimizer_offload.optimizer_state(0.01, cpu)
    assert [row["direction"] for row in rows] == ["d2h", "h2d"]
    assert all(row["gb_per_s"] > 0 for row in rows)
