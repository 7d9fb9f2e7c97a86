"""Tests that a run goes on with another number of data-parallel ranks, on gloo: its state and its losses."""

import os
from pathlib import Path

import pytest
from support.other_ranks import TWO_RANKS, Part, differing, rejoined, run_part
from support.ranks import run_ranks

ON_ONE = ["resident", "streamed", "moe cpu optimizer", "context parallel"]
ON_TWO = [*TWO_RANKS]


def parts(kinds, rank, world_size, ports, **steps) -> dict[str, Part]:
    below = Path(os.environ["SAVE_BELOW"])
    named = zip(kinds, ports, strict=True)
    return {kind: run_part(kind, rank, world_size, port, below / kind, **steps) for kind, port in named}


def one_rank(rank, world_size, ports):
    """Trains four steps, and saves after two."""
    return parts(ON_ONE, rank, world_size, ports, first=0, last=4, save_at=2)


def two_ranks(rank, world_size, ports):
    """Goes on with the runs of one rank, and trains others."""
    resumed = parts(ON_ONE, rank, world_size, ports[: len(ON_ONE)], first=2, last=3, save_at=3)
    return resumed | parts(ON_TWO, rank, world_size, ports[len(ON_ONE) :], first=0, last=3, save_at=2)


def one_rank_again(rank, world_size, ports):
    return parts(ON_ONE, rank, world_size, ports, first=3, last=4)


def three_ranks(rank, world_size, ports):
    """Goes on where the end of each bucket is padded otherwise than with one or two ranks."""
    return parts(["resident"], rank, world_size, ports, first=2, last=3)


def four_ranks(rank, world_size, ports):
    return parts(ON_TWO, rank, world_size, ports, first=2, last=3)


def of_kind(ranks, kind):
    return rejoined([rank[kind] for rank in ranks])


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_BELOW", str(tmp_path))
    on_one = run_ranks(one_rank, 1, num_ports=len(ON_ONE))
    on_two = run_ranks(two_ranks, 2, num_ports=len(ON_ONE) + len(ON_TWO))
    again = run_ranks(one_rank_again, 1, num_ports=len(ON_ONE))
    on_three = run_ranks(three_ranks, 3, num_ports=1)
    on_four = run_ranks(four_ranks, 4, num_ports=len(ON_TWO))
    assert min(on_one[0]["resident"].num_buckets) > 3
    for kind in ON_ONE:
        (_, first, want), (got, second, third) = of_kind(on_one, kind), of_kind(on_two, kind)
        at_last, _, fourth = of_kind(again, kind)
        assert differing(first, got) == differing(second, at_last) == [], kind
        assert third + fourth == pytest.approx(want[2:], abs=1e-3), kind
    for ranks, more, kind in ((on_one, on_three, "resident"), (on_two, on_four, *ON_TWO)):
        (_, saved, want), (loaded, _, got) = of_kind(ranks, kind), of_kind(more, kind)
        assert differing(saved, loaded) == [], kind
        assert got == pytest.approx(want[2:3], abs=1e-3), kind
