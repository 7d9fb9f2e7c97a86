import json
import os

import datasets
import pytest

from nemo_offload_rl.data.datasets import ProblemForm, load_hf_folder, load_jsonl, split_validation
from nemo_offload_rl.data.named import load_named
from nemo_offload_rl.data.problem import MAX_LINE_CHARS, DataError, Problem
from nemo_offload_rl.data.prompts import PromptFormat, read_text_file
from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer
from nemo_offload_rl.run.setup import read_data, read_pairs

FORM = ProblemForm("question", "answer")


def test_jsonl_gives_a_problem_a_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1+1", "answer": "2"}\n\n{"question": "2+3", "answer": 5}')
    assert load_jsonl(tmp_path / "a.jsonl", FORM) == [Problem("1+1", "2"), Problem("2+3", "5")]


def test_a_byte_order_mark_and_other_ends_of_lines_are_no_mistake(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"q": "1\u20281\x85", "a": "2"}, {"q": "2+3", "a": "5"}]
    path.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode("utf-8-sig"))
    problems = load_jsonl(path, ProblemForm("q", "a"))
    assert problems == [Problem("1\u20281\x85", "2"), Problem("2+3", "5")]
    assert [problem.where for problem in problems] == [f"{path}:1", f"{path}:2"]


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl cannot be read"):
        load_jsonl(tmp_path / "absent.jsonl", FORM)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        load_jsonl(tmp_path / "empty.jsonl", FORM)


@pytest.fixture
def table():
    return datasets.Dataset.from_list([{"question": f"{n}+1", "answer": str(n + 1)} for n in range(5)])


def check(problems):
    assert len(problems) == 5
    assert problems[3] == Problem("3+1", "4")
    assert problems[1:3] == [Problem("1+1", "2"), Problem("2+1", "3")]


def test_all_rows_are_read_in_their_order_and_with_their_numbers(tmp_path):
    datasets.Dataset.from_dict({"q": range(2100), "a": range(2100)}).save_to_disk(tmp_path / "data")
    problems = load_hf_folder(tmp_path / "data", None, ProblemForm("q", "a"))
    assert list(problems) == [Problem(str(number), str(number)) for number in range(2100)]
    assert [problem.where for problem in problems][::1050] == [f"{tmp_path}/data row {row}" for row in (0, 1050)]
    assert problems[-1] == problems[2099]
    assert problems[2099:] == [problems[-1]]
    assert problems[:0] == []
    with pytest.raises(IndexError):
        problems[2100]


def test_a_split_of_a_saved_dictionary_is_opened(tmp_path, table):
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(tmp_path / "data")
    check(load_hf_folder(tmp_path / "data", "train", FORM))
    for split in (None, "valid"):
        with pytest.raises(DataError, match=r"has the splits train, test; found split: " + repr(split)):
            load_hf_folder(tmp_path / "data", split, FORM)


def test_a_folder_of_parquet_files_is_opened(tmp_path, table):
    (tmp_path / "data").mkdir()
    table.select(range(3)).to_parquet(tmp_path / "data" / "train-00000-of-00002.parquet")
    table.select(range(3, 5)).to_parquet(tmp_path / "data" / "train-00001-of-00002.parquet")
    table.select([0]).to_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    check(load_hf_folder(tmp_path, "train", FORM))
    assert len(load_hf_folder(tmp_path, "test", FORM)) == 1
    with pytest.raises(DataError, match="no dataset of the split 'valid'"):
        load_hf_folder(tmp_path, "valid", FORM)
    with pytest.raises(DataError, match=r"test, train: .* split\."):
        load_hf_folder(tmp_path, None, FORM)
    (tmp_path / "data" / "test-00000-of-00001.parquet").rename(tmp_path / "data" / "train-00002.parquet")
    assert len(load_hf_folder(tmp_path, None, FORM)) == 6


def test_a_saved_dataset_is_opened_and_missing_columns_and_folders_are_named(tmp_path, table):
    table.save_to_disk(tmp_path / "data")
    with pytest.raises(DataError, match="no column 'solution'"):
        load_hf_folder(tmp_path / "data", None, ProblemForm("question", "solution"))
    check(load_hf_folder(tmp_path / "data", None, FORM))
    with pytest.raises(DataError, match="does not exist"):
        load_hf_folder(tmp_path / "absent", None, FORM)
    datasets.Dataset.from_list([{"q": "1", "a": "1"}, {"q": "2", "a": None}]).save_to_disk(tmp_path / "null")
    with pytest.raises(DataError, match=r"null row 1: the field 'a' must be a text or a number"):
        load_hf_folder(tmp_path / "null", None, ProblemForm("q", "a"))[1]
    (tmp_path / "train.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"parquet files of .* cannot be read"):
        load_hf_folder(tmp_path, None, FORM)


GOOD = b'{"question": "1+1", "answer": "2"}\n'


WRONG_LINES = [
    (b'["1+1", "2"]', "a.jsonl:2 is a list; each line must be one object with the fields 'q"),
    (b'{"question": "1+1", "answer": null}', "a.jsonl:2: the field 'answer' must be a text or a number, found N"),
    (b'{"question": "1+1", "answer": true}', "the field 'answer' must be a text or a number, found True"),
    (b'{"question": "1+1", "answer": ' + b"1" * 5000 + b"}", "a.jsonl:2 has an integer of more than 4,300 digits"),
    (b'{"a":' * 100_000, "a.jsonl:2 has lists or objects nested too deeply to be read"),
    (b'{"question": "1", "answer": NaN}', "the field 'answer' must be a text or a number, found nan"),
    (b'{"question": "1", "answer": 1e400}', "the field 'answer' must be a text or a number, found inf"),
    (b'{"question": "1", "answer": "\\ud800"}', "a.jsonl:2: the field 'answer' has half of a character"),
    (b'{"question": "1", "answer": "2", "answer": "3"}', "a.jsonl:2 has the field 'answer' twice; delete one"),
    (b'{"question": "1", "answer": ' + b"[" * 900 + b"]" * 900 + b"}", "found a list"),
    (b'{"question": "1+1', "a.jsonl:2 is not JSON (Unterminated string starting at"),
    (b"[\n", "is not JSON (Expecting value: line 1 column 2 (char 1)); each line must be one JSON object"),
    (b'{"messages": []}', "a.jsonl:2 has no field 'question'; it has 'messages': for rows of messages, dataset_na"),
    (b"\xff", "cannot be read: 'utf-8' codec can't decode byte 0xff"),
    (b"\x00" * 100, "a.jsonl:2 is not JSON"),
    (b'{"a": "' + b"x" * MAX_LINE_CHARS + b'"}', "a.jsonl:2 has more than 16,777,216 characters"),
    (b"{" + b", ".join(b'"k%d": 1' % n for n in range(10_000)) + b"}", "has no field 'question'; it has 'k0'"),
]


@pytest.mark.parametrize(("line", "message"), WRONG_LINES, ids=lambda value: str(value)[:40])
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


@pytest.mark.parametrize("target", ["absent", "train.parquet", None])
def test_what_is_no_file_in_the_folder_of_a_dataset_is_named(tmp_path, target):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    if target is None:
        os.mkfifo(folder / "train.parquet")
        message = r"train\.parquet, in the folder of a dataset, is neither a file nor a folder"
    else:
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
    message = r"policy\.tokenizer\.chat_template, or that of the tokenizer, cannot be rendered"
    with pytest.raises(DataError, match=message):
        PromptFormat(tokenizer, max_tokens=10).prompts([Problem("1+1", "2")])


SUMS = [{"q": f"{number}", "a": f"{number + 1}"} for number in range(37)]


@pytest.mark.parametrize("size", [0.05, 8, 8.0, 36])
def test_the_parts_are_those_of_datasets(size):
    train, validation = split_validation(SUMS, size, seed=3)
    number = int(size) if size >= 1 else size  # as NeMo-RL does
    expected = datasets.Dataset.from_list(SUMS).train_test_split(test_size=number, seed=3)
    assert train == expected["train"].to_list()
    assert validation == expected["test"].to_list()
    assert split_validation(SUMS, size, seed=3) == (train, validation)
    assert split_validation(SUMS, 18, seed=4)[1] != split_validation(SUMS, 18, seed=3)[1]


def test_without_a_size_nothing_changes():
    assert split_validation(SUMS, 0, seed=3) == split_validation(SUMS, 0.0, seed=3) == (SUMS, [])


@pytest.mark.parametrize(("size", "taken"), [(37, 37), (0.99, 37), (100, 100)])
def test_something_must_be_left_to_train_on(size, taken):
    with pytest.raises(DataError, match=rf"split_validation_size is {size}, which takes {taken} .* has only 37: lower"):
        split_validation(SUMS, size, seed=3)


def test_a_folder_is_split_without_reading_it(tmp_path):
    datasets.Dataset.from_list([*SUMS, {"q": "38", "a": None}]).save_to_disk(str(tmp_path / "rows"))
    problems = load_hf_folder(tmp_path / "rows", None, ProblemForm("q", "a"))
    train, validation = split_validation(problems, 30, seed=0)
    assert (len(train), len(validation)) == (8, 30)
    numbers = split_validation(range(38), 30, seed=0)  # one part has row 37, which is broken
    parts = sorted(zip(numbers, (train, validation), strict=True), key=lambda part: 37 in part[0])
    (of_whole, whole), (of_broken, broken) = parts
    assert [problem.prompt for problem in whole] == [str(number) for number in of_whole]
    assert [problem.where for problem in whole[1:3]] == [f"{tmp_path / 'rows'} row {n}" for n in of_whole[1:3]]
    with pytest.raises(DataError, match="row 37"):  # the row's number in the folder, not in the part
        broken[of_broken.index(37)]


def test_recipes_of_problems_and_pairs_split_their_training_data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row | {"bad": "x"}) for row in SUMS))
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
