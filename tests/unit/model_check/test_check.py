"""Tests the check as a run and `validate --deep` start it."""

import json
import logging
import os
import signal
import subprocess
import sys

import psutil
import pytest
from support.forked_python import forked_python
from support.tiny import tiny_policy

from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.model_check import cache
from nemo_offload_rl.model_check.alone import alone
from nemo_offload_rl.model_check.check import ModelCheck, checked_model
from nemo_offload_rl.model_check.process import CheckProcess, ModelCheckError
from nemo_offload_rl.model_check.result import CheckResult, Difference
from nemo_offload_rl.model_check.twin import twin_config

RIGHT = CheckResult((Difference("padded", 3e-6, 2e-6, "model.norm.weight"),), "cpu", "local", {"model": 0.5})
WRONG = CheckResult((Difference("padded", 0.25, 2e-6, "model.norm.weight"),), "cpu", "local", {"model": 0.5})


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def no_process(monkeypatch):
    """Fails the test if a process is started."""
    monkeypatch.setattr(sys, "executable", "/no/such/python")


def check_of(policy):
    return ModelCheck(policy, hf_config(policy), device="cpu")


def keep(policy, result):
    cache.write(cache.key_of(alone(policy, twin_config(hf_config(policy)).to_dict()), device="cpu"), result)


def test_what_is_not_known_is_found_out_by_a_process_and_then_known(monkeypatch):
    monkeypatch.setattr(sys, "executable", forked_python())
    policy = tiny_policy()
    with check_of(policy) as check:
        message = check.finish()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with check_of(policy) as check:
        assert check.finish() == message
    assert message.startswith("Megatron's results for the model agree with transformers': log-probs of a small twin")


def test_a_model_that_is_known_to_be_wrong_is_refused_before_it_is_built(no_process):
    policy = tiny_policy()
    with pytest.raises(FileNotFoundError):  # shows that the fixture works
        check_of(policy)
    keep(policy, WRONG)
    with pytest.raises(ModelCheckError, match=r"qwen3 model differ from .* differ by 0\.25.*tie_word_embeddings true"):
        check_of(policy)


def test_a_model_without_a_twin_is_trained_only_if_the_check_is_skipped(no_process):
    policy = tiny_policy({"model_type": "mamba"})  # a config without attention heads
    with pytest.raises(ValueError, match=r"cannot make a small model of this mamba config .* policy\.skip_model_check"):
        check_of(policy)
    skipping = policy | {"skip_model_check": True}
    assert "was not checked" in ModelCheck(skipping, hf_config(policy), device="cpu").finish()


def test_a_skipped_check_says_what_is_known(no_process):
    policy = tiny_policy() | {"skip_model_check": True}
    assert "was not checked" in check_of(policy).finish()
    keep(policy, WRONG)
    assert "is trained although" in check_of(policy).finish()
    keep(policy, RIGHT)
    assert "agree with transformers'" in check_of(policy).finish()


@pytest.fixture
def failing_process(shell_process):
    shell_process("echo something >&2", "echo MemoryError >&2", "exit 3")


def test_a_process_that_fails_is_one_sentence_once_the_model_is_built(failing_process):
    with pytest.raises(ModelCheckError, match=r"^The check of the model failed with status 3: MemoryError$"):
        CheckProcess(tiny_policy()).result()
    was_built = False
    message = r"MemoryError; policy\.skip_model_check: true trains without the check$"
    with pytest.raises(ModelCheckError, match=message), checked_model(tiny_policy()):
        was_built = True
    assert was_built


def test_a_process_that_prints_much_is_heard_to_its_end(shell_process):
    noise = "head -c 300000 /dev/zero | tr '\\0' 'x'; echo"
    shell_process(noise, f"({noise}) >&2", f"echo '{json.dumps(RIGHT.to_json())}'")
    assert CheckProcess(tiny_policy()).result(timeout_s=20) == RIGHT
    shell_process("exit 0")
    with pytest.raises(ModelCheckError, match="failed with status 0: it printed nothing"):
        CheckProcess(tiny_policy()).result(timeout_s=20)


@pytest.fixture
def shell_process(tmp_path, monkeypatch):
    def replace(*lines):
        python = tmp_path / "python"
        python.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))

    return replace


def test_a_check_that_takes_too_long_is_a_warning(shell_process):
    shell_process("exec sleep 600")
    with check_of(tiny_policy()) as check:
        message = check.finish(timeout_s=0.1)
    assert not [child for child in psutil.Process().children() if "sleep" in " ".join(child.cmdline())]
    assert message.startswith("The model was not checked against transformers: it did not finish within 0 s")
    assert check.level == logging.WARNING


def test_the_process_ends_with_the_one_that_started_it():
    script = (
        "import json, sys, time\nfrom nemo_offload_rl.model_check.process import CheckProcess\n"
        "process = CheckProcess(json.loads(sys.argv[1]))\nprint(process._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, json.dumps(tiny_policy())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        checking = psutil.Process(int(starter.stdout.readline()))
        os.kill(starter.pid, signal.SIGKILL)
        checking.wait(timeout=300)  # it looks for its starter once it runs


def test_an_error_that_says_nothing_to_users_gives_way_to_what_the_check_says(failing_process):
    with pytest.raises(ModelCheckError, match="failed with status 3"), check_of(tiny_policy()):
        raise KeyError("obscure")
    with pytest.raises(ValueError, match="clear"), check_of(tiny_policy()):
        raise ValueError("clear")


def test_the_result_of_a_model_that_is_right_is_logged(no_process, caplog):
    policy = tiny_policy()
    keep(policy, RIGHT)
    with caplog.at_level("INFO"), checked_model(policy):
        assert not caplog.text
    assert "Megatron's results for the model agree with transformers'" in caplog.text
