"""Tests that the code of docs/add-an-algorithm.md trains, and that no other change is needed."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml
from support.pages import REPOSITORY, blocks, copy_with_changes, run_in
from support.toy_policy import ToyPolicy

from nemo_offload_rl.config import algorithms, resolve_absent_keys
from nemo_offload_rl.data.batch import BatchedData, GlobalCounts
from nemo_offload_rl.worker import group

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


@pytest.fixture
def module(monkeypatch) -> ModuleType:
    """Returns the page's algorithm as a module of this process."""
    spec = SimpleNamespace(group_size=2)
    monkeypatch.setattr(algorithms, "ALGORITHMS", {**algorithms.ALGORITHMS, "pairs": spec})
    module = ModuleType("my_pairs")
    monkeypatch.setitem(sys.modules, "my_pairs", module)  # dataclasses look their module up
    exec(text_of("nemo_offload_rl/algorithms/my_pairs.py"), vars(module))
    return module


def text_of(path: str) -> str:
    [text] = [text for named, _, text in blocks(PAGE) if named == path]
    return text


def pairs_batch(sample_mask: list[float]) -> tuple[torch.Tensor, BatchedData]:
    logprobs = torch.tensor([[0.0, -1.0], [0.0, -3.0], [0.0, -2.0], [0.0, -1.0]])
    token_mask = torch.tensor([[0.0, 1.0]] * 4)
    return logprobs, BatchedData(token_mask=token_mask, sample_mask=torch.tensor(sample_mask)).in_groups(2)


@pytest.mark.parametrize(
    ("sample_mask", "loss", "accuracy"),
    [
        ([1, 1, 1, 1], (0.126928 + 1.313262) / 2, 0.5),  # -log sigmoid(2) and -log sigmoid(-1)
        ([1, 1, 0, 0], 0.126928, 1.0),
        ([0, 0, 0, 0], 0.0, 0.0),
    ],
)
def test_the_loss_is_a_mean_over_pairs_and_0_without_any(module, sample_mask, loss, accuracy):
    logprobs, batch = pairs_batch([float(value) for value in sample_mask])
    found, metrics = module.PairLoss(beta=1.0)(logprobs, batch, GlobalCounts.of(batch))
    assert found.item() == pytest.approx(loss, rel=1e-5)
    assert metrics["preference_accuracy"].item() == accuracy


class Recorded(dict):
    """Records the names of the keys that are read, and of those in its sections."""

    def __init__(self, section: Mapping, read: set[str], prefix: str = "") -> None:
        for key, value in section.items():
            self[key] = Recorded(value, read, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        self._read, self._prefix = read, prefix

    def __getitem__(self, key):
        self._read.add(self._prefix + key)
        return super().__getitem__(key)


def recipe_of_the_page(**section) -> dict:
    """Returns the page's recipe with what its algorithm reads of the common recipes."""
    recipe = yaml.safe_load(text_of(RECIPE))
    problems = {"dataset_name": "arithmetic", "num_digits": 2, "seed": 1}
    train = {**problems, "num_problems": 8, "split_validation_size": 0}
    recipe["pairs"] |= section
    recipe["policy"] |= {"tokenizer": {"name": "arithmetic"}, "train_global_batch_size": 4, "trust_remote_code": False}
    recipe["policy"] |= {"hf_config": {"model_type": "qwen3"}}
    recipe["data"] |= {"shuffle": False, "max_input_seq_length": 16, "train": train}
    recipe["data"]["validation"] |= problems
    recipe["checkpointing"] |= {"checkpoint_must_save_by": None, "save_optimizer": True}
    recipe["checkpointing"] |= {"save_period": 10, "ft_save_period": None}
    resolve_absent_keys(recipe)
    return recipe


def test_every_key_of_the_recipe_is_read_that_is_for_the_algorithm(module, monkeypatch):
    read: set[str] = set()
    monkeypatch.setattr(group, "PolicyWorkerGroup", lambda *args, **settings: ToyPolicy())
    recipe = recipe_of_the_page()
    module.prepare(Recorded(recipe, read)).build(recipe["policy"], cluster=None)
    of_the_run = {"export_hf"}
    assert {f"pairs.{key}" for key in recipe["pairs"].keys() - of_the_run} <= read
    assert {"data.add_bos", "data.add_eos", "data.add_generation_prompt"} <= read


@pytest.mark.parametrize(("val_batches", "rows"), [(0, 32), (3, 12)])
def test_a_validation_has_the_batches_of_the_recipe(module, monkeypatch, val_batches, rows):
    class Policy(ToyPolicy):
        def evaluate(self, data, loss_fn, mbs):
            evaluated.append((data.size, mbs))
            return super().evaluate(data, loss_fn, mbs)

    evaluated: list[tuple[int, int]] = []
    monkeypatch.setattr(group, "PolicyWorkerGroup", lambda *args, **settings: Policy())
    recipe = recipe_of_the_page(val_batches=val_batches, val_global_batch_size=2, val_micro_batch_size=1)
    algorithm = module.prepare(recipe).build(recipe["policy"], cluster=None)
    metrics = algorithm.validate(0)
    assert evaluated == [(rows, 1)]
    assert set(metrics) == {"validation/val_loss", "validation/preference_accuracy"}


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
