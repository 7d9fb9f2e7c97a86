"""Named datasets, of small folders with their columns; the hub is never asked."""

import json
import socket

import datasets
import pytest
from datasets.arrow_writer import ArrowWriter
from huggingface_hub import constants

from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.named import load_named
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import AnsweredContext, Message, Problem
from nemo_offload_rl.named_datasets import NAMED_DATASETS

VERL_ROW = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 1+1?"}],
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
}
QUESTION = {"role": "user", "content": "1+1?"}
USER = Message("user", "1+1?")


def said(text):
    return {"role": "assistant", "content": text}


# Of each dataset: a row with the columns that it has on the hub, and the sample that NeMo-RL makes of it.
ROWS = {
    "OpenMathInstruct-2": (
        {"problem": "1+1?", "generated_solution": "It is 2.", "expected_answer": "2", "problem_source": "gsm8k"},
        Problem("1+1?", "2"),
    ),
    "openmathinstruct2": (
        {"problem": "1+1?", "generated_solution": "It is 2.", "expected_answer": "2", "problem_source": "gsm8k"},
        Problem("1+1?", "2"),
    ),
    "DAPOMath17K": (VERL_ROW, Problem("What is 1+1?", "2")),
    "DAPOMathAIME2024": (VERL_ROW, Problem("What is 1+1?", "2")),
    "AIME2024": ({"id": 1, "problem": "1+1?", "solution": "It is 2.", "answer": "002"}, Problem("1+1?", "002")),
    "AIME2025": ({"question": "1+1?", "answer": "2"}, Problem("1+1?", "2")),
    "DeepScaler": ({"problem": "1+1?", "answer": "2", "solution": "It is 2."}, Problem("1+1?", "2")),
    "gsm8k": ({"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}, Problem("1+1?", "2")),
    "squad": (
        {"context": "One and one are two.", "question": "1+1?", "answers": {"text": ["two", "2"], "answer_start": [1]}},
        AnsweredContext((Message("system", "One and one are two."), USER), "two"),
    ),
    "tulu3_sft_mixture": (
        {"id": "a", "messages": [QUESTION, said("2"), {"role": "user", "content": "Sure?"}, said("Yes")]},
        AnsweredContext((USER, Message("assistant", "2"), Message("user", "Sure?")), "Yes", trains_all_answers=True),
    ),
    "HelpSteer3": (
        {"context": [QUESTION], "response1": "3", "response2": "2", "overall_preference": 2},
        PreferencePair((USER,), "2", "3"),
    ),
    "Tulu3Preference": (
        {"chosen": [QUESTION, said("2")], "rejected": [QUESTION, said("3")]},
        PreferencePair((USER,), "2", "3"),
    ),
}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", NAMED_DATASETS)
def test_a_row_is_what_nemo_rl_makes_of_it_wherever_it_lies(name, tmp_path, monkeypatch):
    dataset, (row, sample) = NAMED_DATASETS[name], ROWS[name]
    split = dataset.splits[0]
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / f"{name}.jsonl").write_text(json.dumps(row))
    (tmp_path / "splits" / name).mkdir(parents=True)
    (tmp_path / "splits" / name / f"{split}.jsonl").write_text(json.dumps(row))
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "parquet" / name / f"{split}-00000-of-00001.parquet")
    datasets.DatasetDict({split: datasets.Dataset.from_list([row])}).save_to_disk(tmp_path / "saved" / name)
    for kind in ("file", "splits", "parquet", "saved"):
        assert list(load_named(name, split=split, root=tmp_path / kind)) == [sample], kind

    asked = []

    def load_dataset(path, subset, split):
        asked.append((path, subset, split))
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    parts = dataset.subsets or (None,)
    assert list(load_named(name, split=split)) == [sample] * len(parts)
    assert asked == [(dataset.hub_path, part, split) for part in parts]


def test_another_column_of_answers_and_rows_that_are_repeated(tmp_path):
    (tmp_path / "OpenMathInstruct-2.jsonl").write_text(json.dumps(ROWS["OpenMathInstruct-2"][0]))
    [example] = load_named("OpenMathInstruct-2", split="train_1M", output_key="generated_solution", root=tmp_path)
    assert example == Problem("1+1?", "It is 2.")
    rows = [{"problem": str(number), "answer": str(number)} for number in range(2)]
    (tmp_path / "AIME2024.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "other" / "AIME2024" / "train.parquet")
    for root in (tmp_path, tmp_path / "other"):
        read = load_named("AIME2024", split="train", repeat=3, root=root)
        assert [problem.prompt for problem in read] == ["0", "1"] * 3
    assert read[5].where.endswith("row 1")


def test_an_undecided_preference_is_a_pair_of_the_first_response(tmp_path):
    (tmp_path / "HelpSteer3.jsonl").write_text(json.dumps(ROWS["HelpSteer3"][0] | {"overall_preference": 0}))
    assert list(load_named("HelpSteer3", split="train", root=tmp_path)) == [PreferencePair((USER,), "3", "3")]


def test_what_is_nowhere_is_refused_with_both_ways(tmp_path):
    with pytest.raises(DataError) as refusal:
        load_named("gsm8k", split="test", root=tmp_path)
    message = str(refusal.value)
    assert "HF_HUB_OFFLINE is set" in message
    assert f"{tmp_path} has neither a folder gsm8k nor a file gsm8k.jsonl" in message
    assert "datasets.load_dataset('openai/gsm8k', 'main')" in message
    assert "data.dataset_root to a folder that has gsm8k/" in message
    assert "with the columns question, answer" in message
    assert "neither" not in error_of("gsm8k", split="test")


def error_of(name, **arguments):
    with pytest.raises(DataError) as refusal:
        load_named(name, **arguments)
    return str(refusal.value)


def test_a_file_without_a_split_stands_for_the_first_one(tmp_path):
    (tmp_path / "squad.jsonl").write_text(json.dumps(ROWS["squad"][0]))
    message = error_of("squad", split="validation", root=tmp_path)
    assert "stands for the split 'train' of squad" in message
    assert f"write that to {tmp_path / 'squad' / 'validation.jsonl'}" in message
    assert "does not exist" in error_of("squad", split="train", root=tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "1+1?", "answer": "2"}, "no '####', after which the answer stands"),
        ("DAPOMath17K", VERL_ROW | {"prompt": []}, "'prompt' must be a list of messages, found a list"),
        ("DAPOMath17K", VERL_ROW | {"reward_model": {"style": "x"}}, "has no field 'ground_truth'; it has 'style'"),
        ("squad", ROWS["squad"][0] | {"answers": {"text": []}}, "must be an object with a list 'text' of one answer"),
        ("tulu3_sft_mixture", {"messages": [QUESTION]}, "is empty"),
        ("HelpSteer3", ROWS["HelpSteer3"][0] | {"overall_preference": "2"}, "must be an integer, found '2'"),
        ("Tulu3Preference", {"chosen": "2", "rejected": "3"}, "'chosen' must be a list of messages, found '2'"),
        ("DeepScaler", {"problem": "1+1?"}, "has no field 'answer'; it has 'problem'"),
    ],
)
def test_a_row_of_another_form_is_named(name, row, message, tmp_path):
    path = tmp_path / f"{name}.jsonl"
    path.write_text(json.dumps(row))
    found = error_of(name, split=NAMED_DATASETS[name].splits[0], root=tmp_path)
    assert found.startswith(f"{path}:1")
    assert message in found


def test_what_is_in_the_cache_of_datasets_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # which stands for the processes of this one, put back at the end
    rows = datasets.Dataset.from_list([ROWS["gsm8k"][0]])
    folder = tmp_path / "cache" / "openai___gsm8k" / "main" / "0.0.0" / "0123456789abcdef"
    folder.mkdir(parents=True)
    with ArrowWriter(path=str(folder / "gsm8k-train.arrow"), features=rows.features) as writer:
        writer.write_table(rows.data.table)
        num_examples, num_bytes = writer.finalize()
    split = datasets.SplitInfo("train", num_bytes, num_examples, dataset_name="gsm8k")
    splits = datasets.SplitDict({"train": split}, dataset_name="gsm8k")
    info = datasets.DatasetInfo(features=rows.features, config_name="main", dataset_name="gsm8k", version="0.0.0")
    info.splits = splits
    info.write_to_directory(str(folder))
    assert list(load_named("gsm8k", split="train")) == [ROWS["gsm8k"][1]]
    assert constants.HF_HUB_OFFLINE is False
