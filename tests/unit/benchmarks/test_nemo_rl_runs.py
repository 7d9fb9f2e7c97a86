"""Tests the data, the overrides and the rows of benchmarks/nemo_rl_runs.py."""

from argparse import Namespace
from pathlib import Path

from gpu_watch import GpuWatch
from nemo_rl_runs import Case, row_of

REPOSITORY = Path(__file__).parents[3]
EXEMPLAR = REPOSITORY / "examples/configs/grpo_math_1B_megatron.yaml"


def test_a_run_that_fails_has_its_row(tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"defaults: {EXEMPLAR}\n")
    arguments = Namespace(folder=tmp_path, scale="small", change=["x:a=1", "one:grpo.no_such_key=1"], limit_s=60)
    (tmp_path / "logs" / "one" / "exp_001").mkdir(parents=True)  # of an earlier run
    (tmp_path / "logs" / "one" / "exp_001" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    with GpuWatch() as watch:
        row = row_of(Case("one", "recipe.yaml", 3), arguments, tmp_path, watch)
    assert row["steps"] == 0 and "no_such_key" in row["status"]
    assert row["overrides"].endswith("grpo.no_such_key=1")
    assert row["status"].startswith("exit status 2: ")
