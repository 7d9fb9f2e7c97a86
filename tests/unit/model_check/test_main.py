"""Tests `python -m nemo_offload_rl.model_check` in this process: where the model comes from, and its output."""

import importlib
import io
import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.tiny import TINY_QWEN3, tiny_policy

from nemo_offload_rl.mcore.patches import cpu_device
from nemo_offload_rl.model_check.process import ENVIRONMENT, REQUEST_ON_STDIN
from nemo_offload_rl.model_check.result import CheckResult

TINY = Path(__file__).parents[3] / "examples/configs/grpo_tiny_cpu.yaml"


@pytest.fixture
def checked(monkeypatch, capfd):
    """Calls it with arguments; returns its exit status and its answer, and checks that it prints nothing else."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)  # importing it sets these, here for this test only
    command = importlib.import_module("nemo_offload_rl.model_check.__main__")
    cpu_device.install()
    torch.set_num_threads(1)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["model_check", *map(str, arguments)])
        capfd.readouterr()
        status = command.main()
        return status, json.loads(capfd.readouterr().out)

    call.command = command
    return call


@pytest.fixture
def config(tmp_path):
    def write(**fields):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(TINY_QWEN3 | fields))
        return path

    return write


def test_a_config_that_megatron_computes_right(checked, config):
    status, answer = checked("--hf-config", config())
    assert (status, answer["is_right"]) == (0, True)
    assert CheckResult.from_json(answer).is_right
    assert {"imports", "config", "transformers", "model"} <= set(answer["seconds"])


IMPOSSIBLE = [
    ({"hidden_act": "no such thing"}, "no such thing"),
    ({"vocab_size": -1}, "has vocab_size -1; give a whole number of at least 1"),
    ({"num_hidden_layers": 0}, "has num_hidden_layers 0; give a whole number of at least 1"),
    ({"hidden_size": "64"}, "policy.hf_config has an invalid value: "),
    ({"model_type": "nemotron_h"}, "cannot make a small model of this nemotron_h config"),
]


@pytest.mark.parametrize(("fields", "message"), IMPOSSIBLE)
def test_a_config_that_cannot_be_is_an_error_on_standard_output(checked, config, fields, message):
    status, answer = checked("--hf-config", config(**fields))
    assert status == 1
    assert message in answer["error"] and "\n" not in answer["error"]


def test_a_recipes_section_for_megatron_counts(checked):
    overrides = ("+policy.megatron_cfg.no_rope_freq=3", "policy.unchecked_megatron_fields=true")
    status, answer = checked("--recipe", TINY, *overrides)
    assert status == 1
    assert "Megatron cannot compute this model" in answer["error"] and "no_rope_freq" in answer["error"]


def test_a_process_that_asks_by_standard_input_gets_errors_as_answers(checked, monkeypatch):
    watching = threading.Event()
    monkeypatch.setattr(checked.command, "_end_with_standard_input", watching.set)  # it would end this process
    policy = tiny_policy(TINY_QWEN3 | {"hidden_act": "no such thing"})
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(policy) + "\n"))
    status, answer = checked(REQUEST_ON_STDIN)
    assert status == 0
    assert "no such thing" in answer["error"]
    assert watching.wait(10)


UNREADABLE = [
    (None, "does not exist; give a model's config.json"),
    (b"{", "is not valid JSON (Expecting property name"),
    (b"\xff{}", "is not valid JSON ("),
    (b"[" * 100_000, "is not valid JSON (maximum recursion depth exceeded"),
    (b"[]", "is JSON, but not an object of fields"),
]


@pytest.mark.parametrize(("written", "message"), UNREADABLE)
def test_a_config_that_cannot_be_read_is_one_sentence_on_standard_error(fails, tmp_path, written, message):
    path = tmp_path / "wrong.json"
    if written is not None:
        path.write_bytes(written)
    error = fails("--hf-config", str(path))
    assert error.startswith(f"--hf-config {path}: {message}") and error.count("\n") == 1


@pytest.fixture
def fails(checked, monkeypatch, capfd):
    """Calls it with arguments that are wrong; returns what it says on standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["model_check", *arguments])
        assert checked.command.main() == 2
        out, err = capfd.readouterr()
        assert not out and "Traceback" not in err
        return err

    return call


def test_a_recipe_with_mistakes_lists_them_on_standard_error(fails):
    assert "no/such.yaml: there is no such recipe" in fails("--recipe", "no/such.yaml")
    assert "grpo.no_such_key: " in fails("--recipe", str(TINY), "grpo.no_such_key=1")
    assert "policy.a=1 overrides a key of a recipe" in fails("--hf-config", "config.json", "policy.a=1")
