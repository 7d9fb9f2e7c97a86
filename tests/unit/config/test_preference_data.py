"""The section `data` of recipes with pairs of answers, by itself: what is wrong with it is said by its own schema."""

import copy
from dataclasses import replace
from typing import TypedDict

import pytest
from pydantic import with_config

from nemo_offload_rl.config import check_named_files, load
from nemo_offload_rl.config.keys.schema_problems import schema_problems
from nemo_offload_rl.config.keys.tree import share_dataset_keys
from nemo_offload_rl.config.problems import RecipeError
from nemo_offload_rl.config.schema.data import PreferenceDataConfig
from nemo_offload_rl.config.schema.value_types import STRICT
from nemo_offload_rl.config.upstream import remove_upstream_keys
from tests.unit.config.conftest import CONFIGS

BINARY = {
    "dataset_name": "BinaryPreferenceDataset",
    "data_path": "pairs.jsonl",
    "prompt_key": "prompt",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
}
RANKED = {"dataset_name": "PreferenceDataset", "data_path": "pairs.jsonl"}
ARITHMETIC = {"dataset_name": "arithmetic", "num_digits": 2, "num_problems": 10, "seed": 1}


@with_config(STRICT)
class Recipe(TypedDict):
    """A recipe with nothing but data."""

    # Pairs of answers.
    data: PreferenceDataConfig


def problems_of(train, **further):
    tokens = {"add_bos": True, "add_eos": True, "add_generation_prompt": False}
    data = {"max_input_seq_length": 8, "shuffle": True, "train": train} | tokens | further
    recipe = {"data": copy.deepcopy(data)}
    problems, _ = remove_upstream_keys(recipe)
    share_dataset_keys(recipe)
    return [*problems, *schema_problems(recipe, Recipe)]


@pytest.mark.parametrize("train", [BINARY, RANKED, ARITHMETIC, BINARY | {"split": "train"}, RANKED | {"split": None}])
def test_each_kind_of_pairs_is_valid_for_both_roles(train):
    assert problems_of(train, validation=train) == []
    assert problems_of(train, validation=None, default={"prompt_file": None, "system_prompt_file": "s.txt"}) == []


def test_keys_of_upstream_are_accepted_where_they_are_off():
    off = {"subset": None, "prompt_file": None, "system_prompt_file": None}
    default = {"dataset_name": None, "prompt_key": None}
    assert problems_of(BINARY | off, validation=RANKED | off, default=default, val_data_paths=None, num_workers=1) == []


@pytest.mark.parametrize(
    ("train", "further", "path", "message"),
    [
        ({"dataset_name": "MMPR"}, {}, "data.train.dataset_name", "'MMPR' is not supported here; give"),
        (BINARY | {"dataset_name": "HFDataset"}, {}, "data.train.dataset_name", "completions (PreferenceDataset)"),
        ({"data_path": "x"}, {}, "data.train.dataset_name", "it is 'arithmetic', 'BinaryPreferenceDataset', 'Pref"),
        (BINARY | {"choosen_key": "c"}, {}, "data.train.choosen_key", "nearest valid key: data.train.chosen_key"),
        (RANKED | {"prompt_key": "p"}, {}, "data.train.prompt_key", "is a key of dataset_name 'Binary"),
        (RANKED | {"data_path": 3}, {}, "data.train.data_path", "must be text; found 3"),
        (
            RANKED | {"subset": "x"},
            {},
            "data.train.subset",
            "this package does not support a subset of a dataset on the hub (found 'x'); name its folder in",
        ),
        (RANKED, {"prompt_file": "x"}, "data.prompt_file", "write it into data.default, or into data.train and"),
        (RANKED, {"default": {"env_name": "math"}}, "data.default.env_name", "unknown key"),
        (RANKED, {"default": {"prompt_key": "p"}}, "data.train.prompt_key", "is a key of dataset_name 'Binary"),
        (RANKED, {"val_data_paths": {"a": "b"}}, "data.val_data_paths", "list the datasets in data.validation"),
        (RANKED, {"add_eos": None}, "data.add_eos", "must be true or false; found null"),
    ],
)
def test_a_wrong_key_is_named_with_its_remedy(train, further, path, message):
    ((found, said),) = problems_of(train, **further)
    assert found == path
    assert message in said


def test_a_missing_key_is_named_with_its_meaning():
    ((path, message),) = problems_of({name: value for name, value in BINARY.items() if name != "data_path"})
    assert path == "data.train.data_path"
    assert message.startswith("missing (its meaning: The file or folder")


def test_pairs_may_be_in_a_file_or_a_folder_which_has_to_be_there(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("{}")
    recipe = load(CONFIGS / "sft_tiny_cpu.yaml")
    found = {"train": BINARY | {"data_path": str(tmp_path / "pairs.jsonl")}, "validation": RANKED}
    data = recipe.config["data"] | found | {"validation": RANKED | {"data_path": str(tmp_path)}}
    check_named_files(replace(recipe, config=recipe.config | {"data": data}))
    absent = data | {"train": BINARY | {"data_path": str(tmp_path / "pair.jsonl")}}
    with pytest.raises(RecipeError, match=r"data\.train\.data_path: there is no file or folder .*did you mean .*pairs"):
        check_named_files(replace(recipe, config=recipe.config | {"data": absent}))
