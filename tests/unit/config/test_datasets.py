"""Recipes' sections data and env: datasets by name, pairs of answers, and rewards."""

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


def test_what_nemo_rl_does_not_split_is_not_split():
    train = "dataset_name: DAPOMath17K, split_validation_size: 0.05, seed: 42"
    recipe = load_data("grpo", train)
    assert not splits_validation_data(recipe.config["data"]["train"])
    assert recipe.notes == ["data.train.split_validation_size has no effect: DAPOMath17K is not split, as in NeMo-RL"]


def test_a_split_that_is_made_has_no_note():
    assert load_data("grpo", "dataset_name: OpenMathInstruct-2, split_validation_size: 0.1").notes == []


def test_a_file_with_the_chat_template_has_to_be_there(tmp_path):
    override = f"+policy.tokenizer.chat_template={tmp_path}/chat.jinja"
    missing = load_data("grpo", "dataset_name: gsm8k", override, "~warm_start")
    with pytest.raises(RecipeError, match=r"policy\.tokenizer\.chat_template: there is no file .*chat\.jinja"):
        check_named_files(missing)
    (tmp_path / "chat.jinja").write_text("")
    check_named_files(missing)
    default = "+policy.tokenizer.chat_template=default"
    check_named_files(load_data("grpo", "dataset_name: gsm8k", default, "~warm_start"))


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


def test_wandb_has_to_be_there(monkeypatch):
    monkeypatch.setattr("nemo_offload_rl.config.named_files.find_spec", lambda name: None)
    wandb = ["~warm_start", "logger.wandb_enabled=true", "++logger.wandb={project: p, name: n}"]
    with pytest.raises(RecipeError, match=r"logger\.wandb_enabled: "):
        check_named_files(load(CONFIGS / "grpo_tiny_cpu.yaml", wandb))


DPO = CONFIGS / "dpo_tiny_cpu.yaml"
BINARY = "dataset_name:BinaryPreferenceDataset,data_path:p.jsonl,prompt_key:p,chosen_key:c,rejected_key:r"
RANKED = "dataset_name:PreferenceDataset,data_path:p.jsonl"


def of(dataset, role="train"):
    return f"data.{role}={{_override_:true,{dataset}}}"


def test_pairs_may_be_in_a_file_or_a_folder_which_has_to_be_there(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("{}")

    def named(train, validation):
        datasets = BINARY.replace("p.jsonl", str(train)), RANKED.replace("p.jsonl", str(validation))
        return load(DPO, ["~warm_start", of(datasets[0]), of(datasets[1], "validation")])

    check_named_files(named(tmp_path / "pairs.jsonl", tmp_path))
    with pytest.raises(RecipeError, match=r"data\.train\.data_path: there is no file or folder .*did you mean .*pairs"):
        check_named_files(named(tmp_path / "pair.jsonl", tmp_path))
