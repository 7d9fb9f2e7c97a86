"""Tests named datasets with small folders that have their columns; never contacts the hub."""

import itertools
import json
import socket

import datasets
import pytest
from datasets.arrow_writer import ArrowWriter
from huggingface_hub import constants

from nemo_offload_rl.data.named import load_named
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import AnsweredContext, DataError, Message, Problem
from nemo_offload_rl.named_datasets import NAMED_DATASETS

VERL_ROW = {
    "data_source": "math_dapo", "prompt": [{"role": "user", "content": "What is 1+1?"}],
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
}  # fmt: skip
QUESTION = {"role": "user", "content": "1+1?"}
USER = Message("user", "1+1?")


def said(text):
    return {"role": "assistant", "content": text}


SOLUTION = {"generated_solution": "It is 2.", "problem_source": "gsm8k"}
SURE = {"role": "user", "content": "Sure?"}
TALK = AnsweredContext((USER, Message("assistant", "2"), Message(**SURE)), "Yes", trains_all_answers=True)
PAIR = PreferencePair((USER,), "2", "3")
# For each dataset: a row with the columns that it has on the hub, and the sample that NeMo-RL makes of it.
ROWS = {
    "OpenMathInstruct-2": ({"problem": "1+1?", "expected_answer": "2", **SOLUTION}, Problem("1+1?", "2")),
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
    "tulu3_sft_mixture": ({"id": "a", "messages": [QUESTION, said("2"), SURE, said("Yes")]}, TALK),
    "Nemotron-Cascade-2-SFT-Math": (
        {"messages": [{"role": "system", "content": "Add."}, QUESTION, said("2")], "source": "a"},
        AnsweredContext((Message("system", "Add."), USER), "2", trains_all_answers=True),
    ),
    "HelpSteer3": ({"context": [QUESTION], "response1": "3", "response2": "2", "overall_preference": 2}, PAIR),
    "Tulu3Preference": ({"chosen": [QUESTION, said("2")], "rejected": [QUESTION, said("3")]}, PAIR),
}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", NAMED_DATASETS)
def test_a_row_is_what_nemo_rl_makes_of_it_wherever_it_lies(name, tmp_path, monkeypatch):
    dataset, (row, sample) = NAMED_DATASETS[name], ROWS["OpenMathInstruct-2" if name == "openmathinstruct2" else name]
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

    def load_dataset(path, subset, split, trust_remote_code):
        assert trust_remote_code is False  # otherwise it may ask on standard input
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
    undecided = ROWS["HelpSteer3"][0] | {"overall_preference": 0}  # is a pair of the first response
    (tmp_path / "HelpSteer3.jsonl").write_text(json.dumps(undecided))
    assert list(load_named("HelpSteer3", split="train", root=tmp_path)) == [PreferencePair((USER,), "3", "3")]
    for root in (tmp_path, tmp_path / "other"):
        read = load_named("AIME2024", split="train", repeat=3, root=root)
        assert [problem.prompt for problem in read] == ["0", "1"] * 3
    assert read[5].where.endswith("row 1")


def test_max_samples_are_those_that_datasets_draws(tmp_path):
    name = "Nemotron-Cascade-2-SFT-Math"
    rows = [{"messages": [{"role": "user", "content": str(number)}, said("2")]} for number in range(40)]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "other" / name / "train.parquet")
    drawn = datasets.Dataset.from_list(rows).shuffle(seed=7).select(range(9))
    wanted = [row["messages"][0]["content"] for row in drawn]
    for root in (tmp_path, tmp_path / "other"):
        drawn = load_named(name, split="train", max_samples=9, seed=7, root=root)
        assert [sample.context[0].content for sample in drawn] == wanted
        assert len(load_named(name, split="train", max_samples=0, root=root)) == 40


def test_what_is_nowhere_is_refused_with_both_ways(tmp_path):
    message = error_of("gsm8k", split="test", root=tmp_path)
    assert "HF_HUB_OFFLINE is set" in message and "data.dataset_root to a folder that has gsm8k/" in message
    assert f"{tmp_path} has neither a folder gsm8k nor a file gsm8k.jsonl" in message
    assert "datasets.load_dataset('openai/gsm8k', 'main')" in message
    assert "neither" not in error_of("gsm8k", split="test")


def error_of(name, **arguments):
    with pytest.raises(DataError) as refusal:
        load_named(name, **arguments)
    return str(refusal.value)


OTHER_FORMS = [
    ("gsm8k", {"question": "1+1?", "answer": "2"}, "no '####', after which the answer stands"),
    ("tulu3_sft_mixture", {"messages": [QUESTION, said("2")], "tools": [{"name": "f"}]}, "tools are not supported"),
    ("DAPOMath17K", VERL_ROW | {"prompt": []}, "'prompt' must be a list of messages, found a list"),
    ("DAPOMath17K", VERL_ROW | {"reward_model": {"style": "x"}}, "has no field 'ground_truth'; it has 'style'"),
    ("squad", ROWS["squad"][0] | {"answers": {"text": []}}, "must be an object with a list 'text' of one answer"),
    ("tulu3_sft_mixture", {"messages": [QUESTION]}, "is empty"),
    ("HelpSteer3", ROWS["HelpSteer3"][0] | {"overall_preference": "2"}, "must be an integer, found '2'"),
    ("Tulu3Preference", {"chosen": "2", "rejected": "3"}, "'chosen' must be a list of messages, found '2'"),
    ("DeepScaler", {"problem": "1+1?"}, "has no field 'answer'; it has 'problem'"),
]


@pytest.mark.parametrize(("name", "row", "message"), OTHER_FORMS)
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
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # set here for the child processes, and restored at the end
    rows = datasets.Dataset.from_list([ROWS["gsm8k"][0]])
    folder = tmp_path / "cache" / "openai___gsm8k" / "main" / "0.0.0" / "0123456789abcdef"
    folder.mkdir(parents=True)
    with ArrowWriter(path=str(folder / "gsm8k-train.arrow"), features=rows.features) as writer:
        writer.write_table(rows.data.table)
        num_examples, num_bytes = writer.finalize()
    split = datasets.SplitInfo("train", num_bytes, num_examples, dataset_name="gsm8k")
    info = datasets.DatasetInfo(features=rows.features, config_name="main", dataset_name="gsm8k", version="0.0.0")
    info.splits = datasets.SplitDict({"train": split}, dataset_name="gsm8k")
    info.write_to_directory(str(folder))
    assert list(load_named("gsm8k", split="train")) == [ROWS["gsm8k"][1]]
    assert constants.HF_HUB_OFFLINE is False


def math_rows(number, mark):
    return [{"problem": f"{mark} {index}", "expected_answer": "1"} for index in range(number)]


def write_shards(folder, split, rows, total):
    for shard in range(total):
        path = folder / f"{split}-{shard:05d}-of-{total:05d}.parquet"
        datasets.Dataset.from_list(rows[shard::total]).to_parquet(path)


def write_gsm8k(folder, **rows_of_subsets):
    for subset, mark in rows_of_subsets.items():
        for split in ("train", "test"):
            row = {"question": f"{mark} {split}", "answer": "1 #### 1"}
            write_shards(folder / subset, split, [row], 1)


def questions(name, split, root):
    return [problem.prompt for problem in load_named(name, split=split, root=root)]


def test_a_mirror_of_the_hub_gives_the_split_alone(tmp_path):
    folder = tmp_path / "OpenMathInstruct-2"
    for split, number in {"train": 4, "train_1M": 3, "train_2M": 2}.items():
        write_shards(folder / "data", split, math_rows(number, split), 1 if split == "train_2M" else 2)
    (folder / "README.md").write_text("about it")
    assert questions("OpenMathInstruct-2", "train", tmp_path) == ["train 0", "train 2", "train 1", "train 3"]
    assert questions("OpenMathInstruct-2", "train_1M", tmp_path) == ["train_1M 0", "train_1M 2", "train_1M 1"]
    assert questions("OpenMathInstruct-2", "train_2M", tmp_path) == ["train_2M 0", "train_2M 1"]
    message = error_of("OpenMathInstruct-2", split="train_5M", root=tmp_path)
    assert "no dataset of the split 'train_5M'" in message and "train_5M.parquet or shards named as" in message
    assert "it has README.md, data/train-00000-of-00002.parquet" in message

    (folder / "data" / "train-00001-of-00002.parquet").unlink()
    assert "has 1 of the 2 files that data/train-00000" in error_of("OpenMathInstruct-2", split="train", root=tmp_path)


def test_a_mirror_gives_the_parts_of_the_dataset_alone(tmp_path):
    write_gsm8k(tmp_path / "gsm8k", main="plain", socratic="asked")
    assert questions("gsm8k", "train", tmp_path) == ["plain train"]
    assert questions("gsm8k", "test", tmp_path) == ["plain test"]
    for number, subset in enumerate(NAMED_DATASETS["AIME2025"].subsets):
        rows = [{"question": f"{subset} {number}", "answer": "1"}]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "AIME2025" / subset / "test.parquet")
        if number == 0:
            message = error_of("AIME2025", split="test", root=tmp_path)
            assert "lacks AIME2025-II of the dataset's parts AIME2025-I, AIME2025-II" in message
    assert questions("AIME2025", "test", tmp_path) == ["AIME2025-I 0", "AIME2025-II 1"]


def test_files_as_the_hub_names_those_it_has_converted(tmp_path):
    for split, shard in itertools.product(("train", "test"), range(2)):
        table = datasets.Dataset.from_list([{"question": split, "answer": "1 #### 1"}])
        table.to_parquet(tmp_path / "gsm8k" / "main" / split / f"{shard:04d}.parquet")
    assert questions("gsm8k", "train", tmp_path) == ["train", "train"]
    old = tmp_path / "OpenMathInstruct-2" / "data" / "train-00000-of-00001-1a2b3c4d5e6f7a8b.parquet"
    datasets.Dataset.from_list(math_rows(1, "old")).to_parquet(old)
    assert questions("OpenMathInstruct-2", "train", tmp_path) == ["old 0"]
    (tmp_path / "AIME2025").mkdir()
    for part in ("I", "II"):
        (tmp_path / "AIME2025" / f"aime2025-{part}.jsonl").write_text('{"question": "1+1?", "answer": "2"}')
    assert questions("AIME2025", "test", tmp_path) == ["1+1?", "1+1?"]


def test_two_sources_of_a_split_are_refused_with_both(tmp_path):
    message = "has two sources of the split 'train': {0} and {1}; keep one"
    write_gsm8k(tmp_path / "parts" / "gsm8k" / "data", main="plain", socratic="asked")
    found = ("data/main/train-00000-of-00001.parquet", "data/socratic/train-00000-of-00001.parquet")
    assert message.format(*found) in error_of("gsm8k", split="train", root=tmp_path / "parts")
    write_gsm8k(tmp_path / "other" / "gsm8k", socratic="asked")
    assert "is of another part of the dataset" in error_of("gsm8k", split="train", root=tmp_path / "other")
    squad = tmp_path / "squad"
    squad.mkdir()
    (squad / "train.jsonl").write_text(json.dumps(ROWS["squad"][0]))
    datasets.Dataset.from_list([ROWS["squad"][0]]).to_parquet(squad / "train.parquet")
    assert message.format("train.jsonl", "train.parquet") in error_of("squad", split="train", root=tmp_path)
    (tmp_path / "squad.jsonl").write_text(json.dumps(ROWS["squad"][0]))
    (squad / "train.parquet").rename(squad / "validation.parquet")
    twice = f"'train' of squad twice: in the folder {squad} and in {tmp_path / 'squad.jsonl'}"
    assert twice in error_of("squad", split="train", root=tmp_path)
    (squad / "train.jsonl").unlink()
    for split in ("train", "validation"):  # the file has the first split, the folder the other
        assert len(load_named("squad", split=split, root=tmp_path)) == 1
    (squad / "validation.parquet").unlink()
    assert "stands for the split 'train' of squad" in error_of("squad", split="validation", root=tmp_path)
