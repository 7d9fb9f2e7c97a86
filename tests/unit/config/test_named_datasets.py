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
        "grpo",
        "dataset_name: OpenMathInstruct-2",
        "data.validation={_override_: true, dataset_name: AIME2025}",
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
    ("recipe", "train", "message"),
    [
        ("grpo", "dataset_name: squad", "data.train.dataset_name: 'squad' is not supported here"),
        ("grpo", "dataset_name: OpenMathInstruct-2, split: test", "'train_5M' for OpenMathInstruct-2; found 'test'"),
        (
            "grpo",
            "dataset_name: OpenMathInstruct-2, output_key: answer",
            "or 'generated_solution' for OpenMathInstruct-2; found 'answer'",
        ),
        (
            "grpo",
            "dataset_name: gsm8k, output_key: answer",
            "data.train.output_key: must be deleted for gsm8k; found 'answer'",
        ),
        (
            "grpo",
            "dataset_name: gsm8k, repeat: 2",
            "data.train.repeat: must be deleted for gsm8k",
        ),
        ("sft", "dataset_name: squad, repeat: 2", "data.train.repeat: is a key of dataset_name 'OpenMathInstruct-2'"),
        (
            "dpo",
            "dataset_name: HelpSteer3, split: test",
            "data.train.split: must be 'train' or 'validation' for HelpSteer3",
        ),
        (
            "sft",
            "dataset_name: squad, system_prompt_file: s.txt",
            "data.train.system_prompt_file: must be null for squad, whose rows have their own system messages",
        ),
        ("dpo", "dataset_name: gsm8k", "data.train.dataset_name: 'gsm8k' is not supported here"),
    ],
)
def test_a_key_that_the_dataset_does_not_read_is_refused(recipe, train, message):
    with pytest.raises(RecipeError) as refusal:
        load_data(recipe, train)
    assert message in str(refusal.value)


def test_validation_data_may_be_a_list():
    several = "[{dataset_name: AIME2024, repeat: 2}, {dataset_name: DAPOMathAIME2024, prompt_file: null}]"
    validated = load_data("grpo", "dataset_name: DeepScaler", f"data.validation={several}")
    first, second = validated.config["data"]["validation"]
    assert first == {"dataset_name": "AIME2024", "repeat": 2, "split": "train", "split_validation_size": 0}
    assert second.items() >= {"dataset_name": "DAPOMathAIME2024", "prompt_file": None, "split": "train"}.items()


@pytest.mark.parametrize(
    ("train", "validation", "is_refused"),
    [
        ("dataset_name: OpenMathInstruct-2", "null", False),  # 5% of it, as in NeMo-RL
        ("dataset_name: OpenMathInstruct-2, split_validation_size: 0", "null", True),
        ("dataset_name: DAPOMath17K, split_validation_size: 0.05", "null", True),  # which is not split
        ("dataset_name: DAPOMath17K", "[]", True),
        ("dataset_name: DAPOMath17K", "[{dataset_name: DAPOMathAIME2024}]", False),
    ],
)
def test_a_validation_needs_data(train, validation, is_refused):
    if is_refused:
        with pytest.raises(RecipeError, match=r"data\.validation: is .*, but grpo\.val_period is 10; name validation"):
            load_data("grpo", train, f"data.validation={validation}")
    else:
        load_data("grpo", train, f"data.validation={validation}")


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        (
            "[{dataset_name: AIME2024, split: test}]",
            "data.validation.0.split: must be 'train' for AIME2024; found 'test'",
        ),
        ("[{dataset_name: AIME}]", "data.validation.0.dataset_name: 'AIME' is not supported here; give"),
        ("[{}]", "data.validation.0.dataset_name: missing; it is 'arithmetic', "),
        (
            "[{dataset_name: gsm8k}, {dataset_name: HFDataset, data_path: d, input_key: q}]",
            "data.validation.1.output_key: missing (its meaning: Column of the answer",
        ),
        ("[{dataset_name: gsm8k, data_path: x}]", "data.validation.0.data_path: is a key of dataset_name 'Resp"),
        ("[{dataset_name: gsm8k, promt_file: x}]", "nearest valid key: data.validation.0.prompt_file"),
        ("[{dataset_name: gsm8k, seed: x}]", "data.validation.0.seed: must be an integer; found 'x'"),
        ("[3]", "data.validation.0: must be a section (a mapping); found 3"),
        ("3", "data.validation: must be a section (a mapping); found 3"),
        (
            "[{dataset_name: openmathinstruct2, split_validation_size: 0.1}]",
            "data.validation.0.split_validation_size: is set, but only data.train is split",
        ),
    ],
)
def test_a_mistake_in_a_list_is_named_by_its_place(validation, message):
    with pytest.raises(RecipeError) as refusal:
        load_data("grpo", "dataset_name: DeepScaler", f"data.validation={validation}")
    assert message in str(refusal.value)
    assert ": 1 problem\n" in str(refusal.value)


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
