import json

import datasets
import pytest

from nemo_offload_rl.data.datasets import ProblemForm, load_hf_folder, split_validation
from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.run.setup import read_data, read_pairs

ROWS = [{"q": f"{number}", "a": f"{number + 1}"} for number in range(37)]


@pytest.mark.parametrize("size", [0.05, 8, 36])
def test_the_parts_are_those_of_datasets(size):
    train, validation = split_validation(ROWS, size, seed=3)
    expected = datasets.Dataset.from_list(ROWS).train_test_split(test_size=size, seed=3)
    assert train == expected["train"].to_list()
    assert validation == expected["test"].to_list()
    assert split_validation(ROWS, size, seed=3) == (train, validation)
    assert split_validation(ROWS, 18, seed=4)[1] != split_validation(ROWS, 18, seed=3)[1]


def test_without_a_size_nothing_changes():
    assert split_validation(ROWS, 0, seed=3) == split_validation(ROWS, 0.0, seed=3) == (ROWS, [])


@pytest.mark.parametrize(("size", "taken"), [(37, 37), (0.99, 37), (100, 100)])
def test_something_must_be_left_to_train_on(size, taken):
    with pytest.raises(DataError, match=rf"split_validation_size is {size}, which takes {taken} .* has only 37: lower"):
        split_validation(ROWS, size, seed=3)


def test_a_folder_is_split_without_reading_it(tmp_path):
    datasets.Dataset.from_list([*ROWS, {"q": "38", "a": None}]).save_to_disk(str(tmp_path / "rows"))
    problems = load_hf_folder(tmp_path / "rows", None, ProblemForm("q", "a"))
    train, validation = split_validation(problems, 30, seed=0)
    assert (len(train), len(validation)) == (8, 30)
    expected = split_validation(range(38), 30, seed=0)
    where = expected[0].index(37) if 37 in expected[0] else expected[1].index(37)
    broken, whole = (train, validation) if 37 in expected[0] else (validation, train)
    assert [problem.prompt for problem in whole] == [str(number) for number in expected[whole is validation]]
    assert [problem.where for problem in whole[1:3]] == [
        f"{tmp_path / 'rows'} row {number}" for number in expected[whole is validation][1:3]
    ]
    with pytest.raises(DataError, match="row 37"):  # the row's number in the folder, not in the part
        broken[where]


def test_recipes_of_problems_and_pairs_split_their_training_data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row | {"bad": "x"}) for row in ROWS))
    split = {"data_path": str(path), "split_validation_size": 5, "seed": 3}
    problems = {"dataset_name": "ResponseDataset", "input_key": "q", "output_key": "a"} | split
    pairs = {"dataset_name": "BinaryPreferenceDataset", "prompt_key": "q", "chosen_key": "a", "rejected_key": "bad"}
    common = {"shuffle": True, "dataset_root": None, "default": {}}
    for read, dataset in ((read_data, problems), (read_pairs, pairs | split)):
        train, validation = read(common | {"train": dataset, "validation": None}, seed=0)
        assert (len(train.problems), len(validation)) == (32, 5)
        assert not any(sample in train.problems for sample in validation)
        whole = {name: value for name, value in dataset.items() if name != "split_validation_size"}
        _, both = read(common | {"train": dataset, "validation": whole}, seed=7)
        assert both[:5] == validation
        assert len(both) == 42
