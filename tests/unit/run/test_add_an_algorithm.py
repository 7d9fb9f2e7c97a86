"""Tests that the code of docs/add-an-algorithm.md trains, and that no other change is needed."""

import json
from pathlib import Path

import pytest
from support.pages import REPOSITORY, blocks, copy_with_changes, run_in

PAGE = REPOSITORY / "docs" / "add-an-algorithm.md"
RECIPE = "examples/configs/my_pairs.yaml"

# In one process, since each process takes seconds to import the libraries.
START_AND_PLAN = f"""
import runpy, sys
from nemo_offload_rl.cli import main
folder = sys.argv.pop()
try:
    runpy.run_path("examples/run_my_pairs.py", run_name="__main__")
except SystemExit as end:
    assert end.code == 0, end.code
sys.exit(main(["plan", {RECIPE!r}, "policy.model_name=" + folder, "policy.hf_config=null"]))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    copy_with_changes(PAGE, folder)
    return folder


def test_the_page_has_the_files_that_it_lists():
    assert {path for path, _, _ in blocks(PAGE)} == {
        "nemo_offload_rl/config/schema/my_pairs.py",
        "nemo_offload_rl/config/algorithms.py",
        "nemo_offload_rl/algorithms/my_pairs.py",
        "examples/configs/my_pairs.yaml",
        "examples/run_my_pairs.py",
    }


@pytest.mark.slow
def test_the_algorithm_trains_a_model_that_the_planner_knows_from_its_hf_config_and_from_its_folder(copy, tmp_path):
    short = ["pairs.max_num_steps=4", "pairs.stop_at_validation_metric=null", "pairs.stop_at_validation_threshold=null"]
    short += ["checkpointing.enabled=false", "policy.skip_model_check=true", "logger.tensorboard_enabled=false"]
    short += ["pairs.val_period=0", f"logger.log_dir={tmp_path}"]
    # Every step trains on the same pairs, so that their loss must fall.
    short += ["data.train.num_problems=32", "data.shuffle=false", "pairs.max_num_epochs=4"]
    short += ["policy.megatron_cfg.optimizer.lr=1e-3", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"]
    run_dir = tmp_path / "exp_001"
    assert "optimizer_state" in run_in(copy, "-c", START_AND_PLAN, *short, str(run_dir / "hf"))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["train/loss"] > rows[-1]["train/loss"] > 0
    assert 0 <= rows[-1]["validation/preference_accuracy"] <= 1


def test_the_code_of_the_page_is_in_the_projects_style(copy):
    paths = sorted({path for path, _, _ in blocks(PAGE) if path.endswith(".py")})
    run_in(copy, "-m", "ruff", "check", "--no-cache", *paths)
    run_in(copy, "-m", "ruff", "format", "--no-cache", "--check", *paths)
