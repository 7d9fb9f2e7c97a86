"""Ranks of tests, which are forked from one prepared process, see the environment of their own test."""

import os

from support.ranks import run_ranks


def read_environment(rank, world_size, ports):
    return os.environ.get("A_TEST_ASKED_FOR")


def test_ranks_see_what_a_test_has_put_into_its_environment(monkeypatch):
    assert run_ranks(read_environment, 2, num_ports=0) == [None, None]
    monkeypatch.setenv("A_TEST_ASKED_FOR", "this")
    assert run_ranks(read_environment, 2, num_ports=0) == ["this", "this"]
