"""The section `data` of recipes with pairs of answers."""

import pytest

from nemo_offload_rl.config import check_named_files, load
from nemo_offload_rl.config.problems import RecipeError
from tests.unit.config.conftest import CONFIGS, each_of

DPO = CONFIGS / "dpo_tiny_cpu.yaml"
BINARY = "dataset_name:BinaryPreferenceDataset,data_path:p.jsonl,prompt_key:p,chosen_key:c,rejected_key:r"
RANKED = "dataset_name:PreferenceDataset,data_path:p.jsonl"


def of(dataset, role="train"):
    return f"data.{role}={{_override_:true,{dataset}}}"


@pytest.mark.parametrize(
    "dataset",
    [
        BINARY,
        RANKED,
        "dataset_name:arithmetic,num_digits:2,num_problems:10,seed:1",
        f"{BINARY},split:train",
        f"{RANKED},split:null",
    ],
)
def test_each_kind_of_pairs_is_valid_for_both_roles(dataset):
    load(DPO, [of(dataset), of(dataset, "validation")])


def test_keys_of_upstream_are_accepted_where_they_are_off():
    off = "subset:null,prompt_file:null,system_prompt_file:null"
    default = "++data.default={dataset_name:null,prompt_key:null}"
    further = ["++data.val_data_paths=null", "++data.num_workers=1"]
    load(DPO, [of(f"{BINARY},{off}"), of(f"{RANKED},{off}", "validation"), default, *further])


BROKEN = {
    "a dataset": [
        of(dataset)
        for dataset in (
            "dataset_name:MMPR",
            BINARY.replace("BinaryPreference", "HF"),
            "data_path:x",
            f"{BINARY},choosen_key:c",
            f"{RANKED},prompt_key:p",
            RANKED.replace("p.jsonl", "3"),
            f"{RANKED},subset:x",
            BINARY.replace("data_path:p.jsonl,", ""),
        )
    ],
    "further keys": [
        f"{of(RANKED)} ++data.{key}"
        for key in (
            "prompt_file=x",
            "default={env_name:math}",
            "default={prompt_key:p}",
            "val_data_paths={a:b}",
            "add_eos=null",
        )
    ],
}


@each_of(BROKEN)
def test_a_wrong_key_is_named_with_its_remedy(overrides, error_of):
    error_of(*overrides, recipe=DPO)


def test_pairs_may_be_in_a_file_or_a_folder_which_has_to_be_there(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("{}")

    def named(train, validation):
        datasets = BINARY.replace("p.jsonl", str(train)), RANKED.replace("p.jsonl", str(validation))
        return load(DPO, ["~warm_start", of(datasets[0]), of(datasets[1], "validation")])

    check_named_files(named(tmp_path / "pairs.jsonl", tmp_path))
    with pytest.raises(RecipeError, match=r"data\.train\.data_path: there is no file or folder .*did you mean .*pairs"):
        check_named_files(named(tmp_path / "pair.jsonl", tmp_path))
