"""Tests that ranks of tests are forked from one prepared process, with the environment of their own test."""

import os
import sys

import pytest
import torch
from support.ranks import run_ranks


def read_environment(rank, world_size, ports):
    return os.environ.get("A_TEST_ASKED_FOR")


def test_ranks_see_what_a_test_has_put_into_its_environment(monkeypatch):
    assert run_ranks(read_environment, 2, num_ports=0) == [None, None]
    monkeypatch.setenv("A_TEST_ASKED_FOR", "this")
    assert run_ranks(read_environment, 2, num_ports=0) == ["this", "this"]


def has_megatrons_bridges(rank, world_size, ports):
    return "megatron.bridge" in sys.modules


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not live through a fork: ranks are started afresh")
def test_ranks_have_what_they_need_imported_already():
    assert run_ranks(has_megatrons_bridges, 1, num_ports=0) == [True]
