import json

import datasets
import pytest

from nemo_offload_rl.data.datasets import load_hf_folder, load_jsonl
from nemo_offload_rl.data.preferences import BinaryForm, PreferencePair, RankedForm
from nemo_offload_rl.data.problem import DataError, Message

BINARY = BinaryForm("prompt", "chosen", "rejected")
USER = {"role": "user", "content": "1+1"}
PAIR = PreferencePair((Message("user", "1+1"),), "2", "3")


def said(text):
    return {"role": "assistant", "content": text}


def binary(prompt="1+1", chosen="2", rejected="3"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def ranked(first=0, second=1, context=(USER,), answers=("2", "3")):
    completions = [
        {"rank": rank, "completion": [said(answer)]} for rank, answer in zip((first, second), answers, strict=True)
    ]
    return {"context": list(context), "completions": completions}


def write_rows(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    "row",
    [
        binary(),
        binary(prompt=[USER]),
        binary(chosen=[said("2")], rejected=2 + 1),
        binary(chosen=[USER, said("2")], rejected=[USER, said("3")]),
        binary(prompt=[USER | {"name": None}], chosen=[USER, said("2")]),
        binary() | {"score": 0.5, "messages": None},
    ],
)
def test_a_prompt_and_two_answers_are_texts_or_messages(tmp_path, row):
    (pair,) = load_jsonl(write_rows(tmp_path / "a.jsonl", row), BINARY)
    assert pair == PAIR
    assert pair.where == f"{tmp_path}/a.jsonl:1"
    renamed = write_rows(tmp_path / "b.jsonl", {"q": "1+1", "good": "2", "bad": "3"})
    assert load_jsonl(renamed, BinaryForm("q", "good", "bad")) == [PAIR]


def test_a_prompt_may_be_a_conversation(tmp_path):
    context = [{"role": "system", "content": "Add."}, USER, said("2"), {"role": "user", "content": "And 2+2?"}]
    rows = [
        binary(context, "4", "5"),
        binary(context, [*context, said("4")], [said("5")]),
        ranked(context=context, answers=("4", "5")),
    ]
    messages = tuple(Message(**message) for message in context)
    expected = PreferencePair(messages, "4", "5")
    assert load_jsonl(write_rows(tmp_path / "a.jsonl", *rows[:2]), BINARY) == [expected] * 2
    assert load_jsonl(write_rows(tmp_path / "b.jsonl", rows[2]), RankedForm()) == [expected]


def test_of_two_completions_the_lower_rank_is_chosen(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", ranked(0, 1), ranked(7, -1, answers=("3", "2")), ranked(1, 2))
    assert load_jsonl(path, RankedForm()) == [PAIR] * 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+1", "chosen": "2"}, "a.jsonl:2 has no field 'rejected'; it has 'prompt', 'chosen'"),
        ('["1+1"]', "a.jsonl:2 is not an object with the fields 'prompt', 'chosen' and 'rejected'"),
        (binary(chosen=None), "a.jsonl:2: the field 'chosen' must be a text or a list of messages, found None"),
        (binary(chosen=" \n"), "a.jsonl:2: the field 'chosen' is an empty answer"),
        (binary(rejected="2"), "a.jsonl:2: the chosen and the rejected answer are the same"),
        (binary(prompt=[]), "a.jsonl:2: the field 'prompt' is empty: its last message must be the user's"),
        (binary(prompt=[USER, said("2")]), "'prompt' ends with one of the role 'assistant'"),
        (binary(chosen=[said("2"), USER]), "'chosen' ends with one of the role 'user'"),
        (
            binary(chosen=[{"role": "user", "content": "1+2"}, said("2")]),
            "'chosen': message 1 is not that of the prompt: write the answer alone, or after exactly",
        ),
        (binary(prompt=["1+1"]), "'prompt', message 1, must be an object with 'role' and 'content', found '1.1'"),
        (binary(chosen=[USER, {"role": "asistant", "content": "2"}]), "message 2, has the role 'asistant': it must be"),
        (binary(chosen=[{"role": "assistant"}]), "message 1, has no field 'content'; it has 'role'"),
        (binary(chosen=[said("2") | {"tool_calls": [1]}]), "message 1, has 'tool_calls', but only 'role' and"),
        ('{"prompt": [{"role": "user", "role": "user", "content": "1"}]}', "a.jsonl:2 has the field 'role' twice"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_line_is_named(tmp_path, row, message):
    path = write_rows(tmp_path / "a.jsonl", binary(), row)
    with pytest.raises(DataError, match=message) as error:
        load_jsonl(path, BINARY)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ranked(1, 1), "a.jsonl:2: both completions have the rank 1, but the lower rank tells which is chosen"),
        (ranked() | {"completions": ranked()["completions"][:1]}, "'completions' must be a list of two.* a list of 1"),
        (ranked() | {"completions": ["2", "3"]}, r"completions\[0\] must be an object with 'rank' and 'completion'"),
        (ranked(0, "1"), r"completions\[1\]: the field 'rank' must be an integer, found '1'"),
        (ranked(answers=("2", "")), r"a.jsonl:2: completions\[1\]: the field 'completion' is an empty answer"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_line_of_ranked_completions_is_named(tmp_path, row, message):
    path = write_rows(tmp_path / "a.jsonl", ranked(), row)
    with pytest.raises(DataError, match=message):
        load_jsonl(path, RankedForm())


def test_pairs_of_a_datasets_folder(tmp_path):
    datasets.Dataset.from_list([ranked(), ranked(1, 0, answers=("3", "2"))]).save_to_disk(tmp_path / "saved")
    pairs = load_hf_folder(tmp_path / "saved", None, RankedForm())
    assert list(pairs) == [PAIR] * 2
    rows = [binary([USER], [said("2")], [said("3")]), binary([USER], [said("2")], [said("2")])]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    pairs = load_hf_folder(tmp_path, "train", BINARY)
    assert pairs[0] == PAIR
    with pytest.raises(DataError, match=r"row 1: the chosen and the rejected answer are the same"):
        list(pairs)
    with pytest.raises(DataError, match="has no column 'context'; it has prompt, chosen, rejected"):
        load_hf_folder(tmp_path, "train", RankedForm())
