"""Recipes that name datasets as NeMo-RL's do."""

from typing import get_args, get_type_hints

import pytest

from nemo_offload_rl.config import check_named_files, load
from nemo_offload_rl.config.keys.tree import splits_validation_data
from nemo_offload_rl.config.problems import RecipeError
from nemo_offload_rl.config.schema.data import NamedConversations, NamedPairs, NamedProblems
from nemo_offload_rl.named_datasets import CONVERSATIONS, PAIRS, PROBLEMS
from tests.unit.config.conftest import CONFIGS


def load_data(recipe, train, *overrides):
    return load(CONFIGS / f"{recipe}_tiny_cpu.yaml", [f"data.train={{_override_: true, {train}}}", *overrides])


@pytest.mark.parametrize(
    ("kind", "table"), [(NamedProblems, PROBLEMS), (NamedConversations, CONVERSATIONS), (NamedPairs, PAIRS)]
)
def test_the_schema_has_the_names_of_the_table(kind, table):
    assert get_args(get_type_hints(kind)["dataset_name"]) == tuple(table)


def test_absent_keys_are_nemo_rls():
    data = load_data(
        "grpo", "dataset_name: OpenMathInstruct-2", "data.validation={_override_: true, dataset_name: AIME2025}"
    ).config["data"]
    assert data["train"] == {
        "dataset_name": "OpenMathInstruct-2",
        "split": "train_1M",
        "output_key": "expected_answer",
        "split_validation_size": 0.05,
        "seed": 42,
    }
    assert data["validation"] == {"dataset_name": "AIME2025", "split": "test", "repeat": 1, "split_validation_size": 0}
    written = "dataset_name: openmathinstruct2, split: train_5M, split_validation_size: 0, seed: 7"
    train = load_data("sft", f"{written}, output_key: generated_solution").config["data"]["train"]
    assert (train["split"], train["split_validation_size"], train["seed"]) == ("train_5M", 0, 7)
    assert train["output_key"] == "generated_solution"


def test_what_nemo_rl_does_not_split_is_not_split():
    train = "dataset_name: DAPOMath17K, split_validation_size: 0.05, seed: 42"
    assert not splits_validation_data(load_data("grpo", train).config["data"]["train"])


@pytest.mark.parametrize(
    ("recipe", "train"),
    [
        ("grpo", "squad"),
        ("grpo", "OpenMathInstruct-2,split:test"),
        ("grpo", "OpenMathInstruct-2,output_key:answer"),
        ("grpo", "gsm8k,output_key:answer"),
        ("grpo", "gsm8k,repeat:2"),
        ("sft", "squad,repeat:2"),
        ("dpo", "HelpSteer3,split:test"),
        ("sft", "squad,system_prompt_file:s.txt"),
        ("dpo", "gsm8k"),
    ],
)
def test_a_key_that_the_dataset_does_not_read_is_refused(recipe, train, error_of):
    error_of(f"data.train={{_override_:true,dataset_name:{train}}}", recipe=CONFIGS / f"{recipe}_tiny_cpu.yaml")


def test_validation_data_may_be_a_list():
    several = "[{dataset_name: AIME2024, repeat: 2}, {dataset_name: DAPOMathAIME2024, prompt_file: null}]"
    validated = load_data("grpo", "dataset_name: DeepScaler", f"data.validation={several}")
    first, second = validated.config["data"]["validation"]
    assert first == {"dataset_name": "AIME2024", "repeat": 2, "split": "train", "split_validation_size": 0}
    assert second.items() >= {"dataset_name": "DAPOMathAIME2024", "prompt_file": None, "split": "train"}.items()


@pytest.mark.parametrize(
    ("train", "validation", "is_refused"),
    [
        ("OpenMathInstruct-2", "null", False),  # 5% of it, as in NeMo-RL
        ("OpenMathInstruct-2,split_validation_size:0", "null", True),
        ("DAPOMath17K,split_validation_size:0.05", "null", True),  # which is not split
        ("DAPOMath17K", "[]", True),
        ("DAPOMath17K", "[{dataset_name:DAPOMathAIME2024}]", False),
    ],
)
def test_a_validation_needs_data(train, validation, is_refused, error_of):
    overrides = f"data.train={{_override_:true,dataset_name:{train}}}", f"data.validation={validation}"
    if is_refused:
        error_of(*overrides)
    else:
        load(CONFIGS / "grpo_tiny_cpu.yaml", overrides)


@pytest.mark.parametrize(
    "validation",
    [
        "[{dataset_name:AIME2024,split:test}]",
        "[{dataset_name:AIME}]",
        "[{}]",
        "[{dataset_name:gsm8k},{dataset_name:HFDataset,data_path:d,input_key:q}]",
        "[{dataset_name:gsm8k,data_path:x}]",
        "[{dataset_name:gsm8k,promt_file:x}]",
        "[{dataset_name:gsm8k,seed:x}]",
        "[3]",
        "3",
        "[{dataset_name:openmathinstruct2,split_validation_size:0.1}]",
    ],
)
def test_a_mistake_in_a_list_is_named_by_its_place(validation, error_of):
    error_of("data.train={_override_:true,dataset_name:DeepScaler}", f"data.validation={validation}")


def test_a_file_with_the_chat_template_has_to_be_there(tmp_path):
    override = f"+policy.tokenizer.chat_template={tmp_path}/chat.jinja"
    missing = load_data("grpo", "dataset_name: gsm8k", override, "~warm_start")
    with pytest.raises(RecipeError, match=r"policy\.tokenizer\.chat_template: there is no file .*chat\.jinja"):
        check_named_files(missing)
    (tmp_path / "chat.jinja").write_text("")
    check_named_files(missing)
    check_named_files(
        load_data("grpo", "dataset_name: gsm8k", "+policy.tokenizer.chat_template=default", "~warm_start")
    )


def test_prompt_files_of_every_dataset_have_to_be_there(tmp_path):
    (tmp_path / "there.txt").write_text("{}")
    validation = f"[{{dataset_name: gsm8k, prompt_file: '{tmp_path}/there.txt', system_prompt_file: nope.txt}}]"
    overrides = (f"data.validation={validation}", "+data.default.prompt_file=prompt.txt", "~warm_start")
    recipe = load_data("grpo", "dataset_name: DeepScaler, prompt_file: train.txt", *overrides)
    with pytest.raises(RecipeError) as refusal:
        check_named_files(recipe)
    for key in ("data.default.prompt_file", "data.train.prompt_file", "data.validation.0.system_prompt_file"):
        assert f"{key}: there is no file" in str(refusal.value)
    assert ": 3 problems\n" in str(refusal.value)
