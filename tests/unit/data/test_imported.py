"""Dataset classes of the user's: what they are called with, what is read of them, and what is refused."""

import sys

import pytest

from nemo_offload_rl import config
from nemo_offload_rl.algorithms import sft
from nemo_offload_rl.config.named_files import check_named_files
from nemo_offload_rl.config.problems import RecipeError
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import AnsweredContext, DataError, Message
from nemo_offload_rl.run.setup import read_data, read_pairs
from tests.unit.config.conftest import CONFIGS

MODULE = """
from datasets import Dataset

calls = []

def talk(number):
    return {"messages": [{"role": "user", "content": f"{number}="}, {"role": "assistant", "content": f"{number}"}]}

class Rows:
    def __init__(self, num_rows=3, split_validation_size=0, **keys):
        calls.append({"num_rows": num_rows, "split_validation_size": split_validation_size, **keys})
        self.dataset = Dataset.from_list([talk(number) for number in range(num_rows)])
        self.val_dataset = None
        if split_validation_size:
            self.val_dataset, self.dataset = self.dataset.select([0]), self.dataset.select(range(1, num_rows))

class Converted(Rows):
    def __init__(self, **keys):
        self.dataset = Dataset.from_list([{"number": 5}])

    def preprocessor(self, row):
        return talk(row["number"])

class SplitsItself:
    def __init__(self, **keys):
        self.dataset, self.val_dataset = Dataset.from_list([talk(0), talk(1)]), Dataset.from_list([talk(2)])

class Pairs:
    def __init__(self, **keys):
        ranked = [(1, [{"role": "assistant", "content": "6"}]), (0, [{"role": "assistant", "content": "5"}])]
        answers = [{"rank": rank, "completion": completion} for rank, completion in ranked]
        self.dataset = Dataset.from_list([{"context": [{"role": "user", "content": "5="}], "completions": answers}])

class OfAList:
    def __init__(self, **keys):
        self.dataset = [talk(1)]

class Strict:
    def __init__(self, dataset_name):
        self.dataset = Dataset.from_list([talk(1)])

class Misspelt:
    def __init__(self, **keys):
        self.dataset = misspelt

class Columns:
    def __init__(self, **keys):
        self.dataset = Dataset.from_list([{"prompt": "1="}])
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(MODULE)
    (tmp_path / "broken_data.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("own_data", "broken_data"):
        sys.modules.pop(name, None)


def loaded(train, *overrides, algorithm="sft"):
    data = [f"data.train={{_override_: true, {train}}}", *overrides]
    if algorithm != "sft":
        data.append("~warm_start")
    return config.load(CONFIGS / f"{algorithm}_tiny_cpu.yaml", data)


def conversation(number, where):
    return AnsweredContext((Message("user", f"{number}="),), f"{number}", where, trains_all_answers=True)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_class_is_called_with_its_section_and_gives_its_rows(algorithm):
    own = "dataset_name: own_data.Rows, num_rows: 2, data_path: absent.jsonl"
    recipe = loaded(own, "++data.default.prompt_file=null", algorithm=algorithm)
    assert "own_data" not in sys.modules  # reading a recipe executes nothing
    check_named_files(recipe)  # its data_path means what the class takes it for
    train, validation = read_data(recipe.config["data"], 1)
    assert list(train.problems) == [conversation(number, f"own_data.Rows row {number}") for number in (0, 1)]
    assert len(validation) == recipe.config["data"]["validation"]["num_problems"]
    [call] = sys.modules["own_data"].calls
    keys = {"num_rows": 2, "split_validation_size": 0, "dataset_name": "own_data.Rows", "data_path": "absent.jsonl"}
    assert keys.items() <= call.items()
    assert set(call) - set(keys) == set(recipe.config["data"]["default"])


def test_a_class_may_have_the_only_rows_for_validation():
    own = ["data.validation=null", "sft.val_period=5"]
    recipe = loaded("dataset_name: own_data.SplitsItself", *own)
    assert [problem.answer for problem in read_data(recipe.config["data"], 1)[1]] == ["2"]
    overrides = ["policy.train_global_batch_size=2", "policy.train_micro_batch_size=2"]
    assert sft.prepare(loaded("dataset_name: own_data.SplitsItself", *own, *overrides).config).schedule.val_period == 5
    with pytest.raises(DataError, match=r"no validation data, .* but the recipe validates \(val_period 5, "):
        sft.prepare(loaded("dataset_name: own_data.Rows", *own, *overrides).config)


def test_a_class_splits_its_rows_itself_and_rows_for_validation_may_be_of_a_class():
    recipe = loaded("dataset_name: own_data.Rows, split_validation_size: 0.3", "data.validation=null")
    train, validation = read_data(recipe.config["data"], 1)
    assert [problem.answer for problem in train.problems] == ["1", "2"]
    assert [problem.answer for problem in validation] == ["0"]
    own = "[{dataset_name: own_data.Rows, num_rows: 1, seed: 3}, {dataset_name: own_data.Converted}]"
    recipe = loaded("dataset_name: own_data.Rows", f"data.validation={own}")
    assert recipe.notes == []
    assert [problem.answer for problem in read_data(recipe.config["data"], 1)[1]] == ["0", "5"]


def test_pairs_are_ranked_completions():
    recipe = loaded("dataset_name: own_data.Pairs", algorithm="dpo")
    train, _ = read_pairs(recipe.config["data"], 1)
    assert list(train.problems) == [PreferencePair((Message("user", "5="),), "5", "6")]


NO_DATASETS = [
    ("dataset_name: missing_data.Rows", "module missing_data cannot be imported: ModuleNotFoundError: No module"),
    (
        "dataset_name: broken_data.Rows",
        "module broken_data cannot be imported: ZeroDivisionError.*broken_data.py, line",
    ),
    ("dataset_name: own_data.Missing", "data.train.dataset_name is own_data.Missing, but .* has no class Missing"),
    ("dataset_name: own_data.OfAList", "as the attribute dataset, a datasets.Dataset; found list"),
    ("dataset_name: own_data.talk", "must be a class that holds a dataset, but is function"),
    ("dataset_name: own_data.Strict, seed: 1", r"its section \(dataset_name, seed\): .* argument 'seed'$"),
    ("dataset_name: own_data.Misspelt", r"NameError: .*own_data\.py, line [0-9]+\)"),
    ("dataset_name: own_data.Columns", "own_data.Columns has no column 'messages'; it has 'prompt"),
    ("dataset_name: own_data.Converted, split_validation_size: 0.1", "is 0.1, but .* no val_data"),
]


@pytest.mark.parametrize(("section", "message"), NO_DATASETS)
def test_what_is_no_dataset_is_refused(section, message):
    with pytest.raises(DataError, match=message):
        read_data(loaded(section).config["data"] | {"default": {}}, 1)


@pytest.mark.parametrize("name", ["NuminaMath-1.5", "own_data", "own_data.", "../own_data.Rows"])
def test_other_names_are_those_of_datasets(name):
    with pytest.raises(RecipeError, match=r"data.train.dataset_name: .* is not supported here; .*package.module.Class"):
        loaded(f"dataset_name: '{name}'")
