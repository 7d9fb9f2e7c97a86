"""Tests an unreachable Hugging Face hub: the cache is used, and no request is repeated."""

import json
import os
import socket
import subprocess
import sys

import pytest
from huggingface_hub import constants

from nemo_offload_rl.hub import cache_only, why_unreachable


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # restored at the end if it was set


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return port


def test_a_hub_that_listens_is_asked_unless_it_is_switched_off(listening, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening}")
    assert why_unreachable() is None
    assert not cache_only("some/model")
    assert os.environ["HF_HUB_OFFLINE"] == ""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert why_unreachable() == "HF_HUB_OFFLINE is set"


def test_a_hub_that_does_not_is_not_asked_by_this_process_or_its_children(closed, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}")
    assert not cache_only(str(tmp_path))  # this is a folder
    assert os.environ["HF_HUB_OFFLINE"] == ""
    assert why_unreachable() == f"http://127.0.0.1:{closed} cannot be reached: Connection refused"
    assert cache_only("some/model")
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_proxy_in_front_of_the_hub_counts(listening, closed, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listening}")
    assert why_unreachable() is None
    monkeypatch.setenv("http_proxy", f"127.0.0.1:{closed}")
    assert why_unreachable() == "http://hub.invalid cannot be reached through 127.0.0.1: Connection refused"
    monkeypatch.setenv("no_proxy", "hub.invalid")
    assert "http://hub.invalid cannot be reached: " in str(why_unreachable())


def test_a_model_of_the_cache_is_found_and_another_is_answered_at_once(closed, tmp_path):
    cached = tmp_path / "models--some--model"
    (cached / "snapshots" / "0f").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0f")
    (cached / "snapshots" / "0f" / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 48}))
    code = """
from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.hf_config import hf_config
print(hf_config({"model_name": "some/model"}).hidden_size)
for name in ("another/model", "models/qwen"):
    for load in (lambda: hf_config({"model_name": name}), lambda: load_tokenizer(name)):
        try:
            load()
        except ValueError as error:
            print(error)
"""
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    endpoint = f"http://127.0.0.1:{closed}"
    environ = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, cwd=tmp_path)
    size, *errors = done.stdout.splitlines()
    assert size == "48"
    names = [(key, name) for name in ("another/model", "models/qwen") for key in ("model_name", "tokenizer.name")]
    for (key, name), error in zip(names, errors, strict=True):
        assert error.startswith(f"policy.{key} is '{name}', which is neither a folder")
        assert ("models is one, and has no qwen; did you mean models/qwen3?" in error) is (name == "models/qwen")
        assert f"nor in the cache of the hub, and {endpoint} cannot be reached: Connection refused; give a" in error
    assert "Retry" not in done.stderr
