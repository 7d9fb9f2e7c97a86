"""Tests the engine in another trainer's loop, as examples/bare_megatron.py shows it."""

import json
import re
import subprocess

import pytest
from support.examples import ROOT, environment
from support.forked_python import forked_python

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "examples" / "bare_megatron.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [forked_python(), str(SCRIPT), *arguments], cwd=ROOT, env=environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def plain() -> str:
    """Returns the output of a run without the engine."""
    return run("--no-offload")


def test_the_engine_changes_no_loss_and_says_what_the_moves_took(plain):
    offloaded = run()
    assert losses(offloaded) == losses(plain)
    assert len(losses(plain)) == 5
    assert losses(plain)[-1] < losses(plain)[0] - 0.05
    measured = dict(re.findall(r"^(\S+): ([\d.]+)$", offloaded, re.MULTILINE))
    # Summed over the steps, since the last copies to the GPU may still have been under way.
    assert float(measured["refit/optimizer_state/gb"]) >= float(measured["train/optimizer_state/gb"]) > 0
    assert float(measured["generate/params/gb"]) >= float(measured["train/params/gb"]) > 0
    assert "refit/optimizer_state/gb" not in plain


def test_one_argument_streams_optimizer_state_and_changes_no_loss(plain):
    streamed = run("--streamed")
    assert losses(streamed) == losses(plain)
    measured = dict(re.findall(r"^(\S+): ([\d.]+)$", streamed, re.MULTILINE))
    assert float(measured["train/optimizer_state/gb"]) > 0
    assert "refit/optimizer_state/gb" not in measured


def test_it_is_as_short_as_promised():
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) < 60
    assert not re.search(r"import ray|\bray\.|recipe|nemo_offload_rl\.(worker|config|plan)", SCRIPT.read_text())


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
