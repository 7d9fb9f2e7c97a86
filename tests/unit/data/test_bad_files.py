"""Tests files that hold no valid data: each is refused at once, with the line at fault."""

import os

import datasets
import pytest

from nemo_offload_rl.data.datasets import ProblemForm, load_hf_folder, load_jsonl
from nemo_offload_rl.data.named import load_named
from nemo_offload_rl.data.problem import MAX_LINE_CHARS, DataError, Problem
from nemo_offload_rl.data.prompts import PromptFormat, read_text_file
from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer

FORM = ProblemForm("question", "answer")
GOOD = b'{"question": "1+1", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'["1+1", "2"]', "a.jsonl:2 is not an object with the fields 'question' and 'answer'"),
        (
            b'{"question": "1+1", "answer": null}',
            "a.jsonl:2: the field 'answer' must be a text or a number, found None",
        ),
        (b'{"question": "1+1", "answer": true}', "the field 'answer' must be a text or a number, found True"),
        (b'{"question": "1+1", "answer": ' + b"1" * 5000 + b"}", "a.jsonl:2 has an integer of more than 4,300 digits"),
        (b'{"a":' * 100_000, "a.jsonl:2 has lists or objects nested too deeply to be read"),
        (b'{"question": "1", "answer": NaN}', "the field 'answer' must be a text or a number, found nan"),
        (b'{"question": "1", "answer": 1e400}', "the field 'answer' must be a text or a number, found inf"),
        (b'{"question": "1", "answer": "\\ud800"}', "a.jsonl:2: the field 'answer' has half of a character"),
        (b'{"question": "1", "answer": "2", "answer": "3"}', "a.jsonl:2 has the field 'answer' twice; delete one"),
        (b'{"question": "1", "answer": ' + b"[" * 900 + b"]" * 900 + b"}", "found a list"),
        (b"\xff", "cannot be read: 'utf-8' codec can't decode byte 0xff"),
        (b"\x00" * 100, "a.jsonl:2 is not JSON"),
        (b'{"a": "' + b"x" * MAX_LINE_CHARS + b'"}', "a.jsonl:2 has more than 16,777,216 characters"),
        (b"{" + b", ".join(b'"k%d": 1' % n for n in range(10_000)) + b"}", "has no field 'question'; it has 'k0'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + line)
    with pytest.raises(DataError) as caught:
        load_jsonl(path, FORM)
    assert message in str(caught.value) and len(str(caught.value)) < 600


def test_what_is_odd_and_right_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"question": "1", "answer": "' + b"x" * 10**7 + b'"}\r'
        b'{"question": "\\u0000", "answer": 2.50, "score": NaN}\r'
        b'{"question": "2", "answer": ' + b"9" * 400 + b"}\r"
        b'{"id": 1, "question": "a\xe2\x80\xa8b", "answer": "\\ud83d\\ude00", "id": 2}'
    )
    problems = load_jsonl(path, FORM)
    assert [problem.prompt for problem in problems] == ["1", "\0", "2", "a\u2028b"]
    assert [problem.answer[:3] for problem in problems] == ["xxx", "2.5", "999", "\U0001f600"]
    assert problems[3].where == f"{path}:4"


NO_FILES = {
    "a FIFO": (os.mkfifo, "it is a FIFO, not a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
    "a link to itself": (lambda path: path.symlink_to(path), "too many levels of symbolic links"),
}


@pytest.mark.parametrize(("make", "message"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_is_not_waited_for(tmp_path, make, message):
    path = tmp_path / "odd"
    make(path)
    with pytest.raises(DataError, match=f"The dataset .*odd cannot be read: {message}"):
        load_jsonl(path, FORM)
    with pytest.raises(DataError, match=f"data.default.prompt_file: .*odd cannot be read: {message}"):
        read_text_file(str(path), "data.default.prompt_file")


def test_a_fifo_in_the_folder_of_a_dataset_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "state.json")
    with pytest.raises(DataError, match=r"state\.json, in the folder of a dataset, is neither a file nor a folder"):
        load_hf_folder(tmp_path, None, FORM)


@pytest.mark.parametrize("target", ["absent", "train.parquet"])
def test_a_link_to_nothing_in_the_folder_of_a_dataset_is_named(tmp_path, target):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    (folder / "train.parquet").symlink_to(folder / target)  # to itself, in one case
    message = r"train\.parquet, in the folder of a dataset, cannot be read \(.*\): a link there must lead to a file"
    with pytest.raises(DataError, match=message):
        load_hf_folder(folder, "train", FORM)
    with pytest.raises(DataError, match=message):
        load_named("gsm8k", split="train", root=tmp_path)


DAMAGED = {
    "state.json of another form": ("state.json", b"[]"),
    "dataset_info.json of another form": ("dataset_info.json", b"null"),
    "an empty table": ("data-00000-of-00001.arrow", b""),
    "no table": ("data-00000-of-00001.arrow", None),
}


@pytest.mark.parametrize(("name", "content"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_dataset_is_named(tmp_path, name, content):
    folder = tmp_path / "saved"
    datasets.Dataset.from_list([{"question": "1+1", "answer": "2"}]).save_to_disk(str(folder))
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(DataError, match="saved is not what datasets' save_to_disk writes, or is damaged"):
        load_hf_folder(folder, None, FORM)


@pytest.mark.parametrize("template", ["{{", "{{ 1/0 }}", "{{ raise_exception('no') }}"])
def test_a_chat_template_that_fails_is_named(template):
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(
        DataError, match=r"policy\.tokenizer\.chat_template, or that of the tokenizer, cannot be rendered"
    ):
        PromptFormat(tokenizer, max_tokens=10).prompts([Problem("1+1", "2")])
