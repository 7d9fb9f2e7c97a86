import json

import datasets
import pytest

from nemo_offload_rl.data.datasets import ProblemForm, load_hf_folder, load_jsonl
from nemo_offload_rl.data.problem import DataError, Problem

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


def test_a_saved_dataset_is_opened_and_missing_columns_and_folders_are_named(tmp_path, table):
    table.save_to_disk(tmp_path / "data")
    with pytest.raises(DataError, match="no column 'solution'; it has question, answer"):
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
