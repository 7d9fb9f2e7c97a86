"""Tests that the benchmark of four GPUs keeps what it has measured."""

import json
import sys

import pytest
import scale


def test_a_layout_that_fails_leaves_the_rows_before_it(tmp_path, monkeypatch):
    output = tmp_path / "scale.json"
    monkeypatch.setattr(sys, "argv", ["scale.py", "--train", "one", "dp", "--grpo", "tp", "--output", str(output)])
    monkeypatch.setattr(scale, "train_row", lambda name, _: {"part": "train", "layout": name})

    def fail(*_):
        raise RuntimeError("a rank ended with an error")

    monkeypatch.setattr(scale, "grpo_rows", fail)
    with pytest.raises(RuntimeError, match="a rank"):
        scale.main()
    assert [row["layout"] for row in json.loads(output.read_text())["rows"]] == ["one", "dp"]


def test_layouts_share_the_gpus():
    assert scale.layout_of("one", 4) == {"gpus": 1, "cp": 1, "tp": 1}
    assert scale.layout_of("tp", 4) == {"gpus": 4, "cp": 1, "tp": 2}
