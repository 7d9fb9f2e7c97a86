"""docs/add-an-algorithm.md is right: what it says to write trains, and nothing else has to change."""

import json
from pathlib import Path

import pytest
from support.pages import REPOSITORY, blocks, copy_with_changes, run_in

PAGE = REPOSITORY / "docs" / "add-an-algorithm.md"
RECIPE = "examples/configs/my_pairs.yaml"


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
    short = ["pairs.max_num_steps=2", "pairs.stop_at_validation_metric=null", "pairs.stop_at_validation_threshold=null"]
    short += ["checkpointing.enabled=false", "policy.skip_model_check=true", f"logger.log_dir={tmp_path}"]
    run_in(copy, "examples/run_my_pairs.py", *short)
    run_dir = tmp_path / "exp_001"
    first, second = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert first["train/loss"] > second["train/loss"] > 0
    assert 0 <= second["validation/preference_accuracy"] <= 1
    folder = [f"policy.model_name={run_dir / 'hf'}", "policy.hf_config=null"]
    assert "optimizer_state" in run_in(copy, "-m", "nemo_offload_rl.cli", "plan", RECIPE, *folder)


def test_a_recipe_that_would_split_groups_is_refused(copy):
    with pytest.raises(AssertionError, match=r"policy\.train_micro_batch_size: must be a multiple of 2, the rows that"):
        run_in(copy, "-m", "nemo_offload_rl.cli", "validate", RECIPE, "policy.train_micro_batch_size=1")


def test_the_code_of_the_page_is_in_the_projects_style(copy):
    paths = sorted({path for path, _, _ in blocks(PAGE) if path.endswith(".py")})
    run_in(copy, "-m", "ruff", "check", "--no-cache", *paths)
    run_in(copy, "-m", "ruff", "format", "--no-cache", "--check", *paths)
