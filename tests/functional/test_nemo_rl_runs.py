"""Runs benchmarks/nemo_rl_runs.py with an exemplar shaped like NeMo-RL's GRPO recipe, at the tiny scale."""

import json
import subprocess

import pytest
from support.examples import ROOT, environment
from support.forked_python import forked_python

pytestmark = pytest.mark.slow


def test_grpo_with_gsm8ks_columns_runs_to_its_end(tmp_path):
    """Judges answers with math-verify and reads the data with the loader of named datasets."""
    command = [
        forked_python(), "benchmarks/nemo_rl_runs.py", "--folder", "examples/configs", "--scale", "tiny",
        "--cases", "gsm8k", "--steps", "2", "--work", tmp_path / "work", "--output", tmp_path / "runs.json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [row] = json.loads((tmp_path / "runs.json").read_text())["rows"]
    assert (row["status"], row["steps"], row["unjudged_answers"]) == ("done", 2, 0)
    assert "dataset_name=gsm8k" in row["overrides"]
