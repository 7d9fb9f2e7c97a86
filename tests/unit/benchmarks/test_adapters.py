"""Tests the benchmark of other trainers' ways to move training state, on tiny models without a GPU."""

import adapters
import pytest
import torch
from adapter_ways.cases import CASES
from adapter_ways.measure import Cycle, link_fields, measure
from adapter_ways.ways import WAYS
from offload_ways.real_optimizer import model_and_optimizer

from nemo_offload_rl.memory.link import LinkSpeed

FIELDS = {
    "case", "way", "gb", "tensors", "first_out_s", "first_back_s", "out_s", "out_waited_s", "back_s", "back_waited_s",
    "cycles", "share_of_link_out", "share_of_link_back", "left_gb", "pinned_over_moved", "host_over_moved",
    "addresses_kept", "state_bit_equal", "next_step_bit_equal",
}  # fmt: skip


@pytest.mark.parametrize("case", ["1.5B, 12 bytes a parameter", "experts, 10,000 tensors"])
def test_ways_with_the_engine_keep_addresses_state_and_the_next_step(case):
    ways = ["resident", "ours in megatron_core", "ours in nemo_rl"]
    rows = adapters.compared([measure(CASES[case].scaled("tiny"), way, cycles=1) for way in ways])
    for row, way in zip(rows, ways, strict=True):
        assert set(row) == FIELDS
        assert (row["case"], row["way"]) == (case, way)
        assert row["addresses_kept"] and row["state_bit_equal"] and row["next_step_bit_equal"]
    assert rows[0]["out_s"] < rows[1]["out_s"]


def test_every_process_has_the_same_model(monkeypatch):
    """megatron-core creates routers on the CPU, whose generator each process seeds differently."""
    case = CASES["experts, 10,000 tensors"].scaled("tiny")
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)  # on a GPU it leaves the CPU's generator alone

    def routers():
        torch.default_generator.seed()  # as in a new process
        with model_and_optimizer(case.hf_config, case.overrides) as (model, _):
            return {name: weight.clone() for name, weight in model[0].named_parameters() if "router" in name}

    once, again = routers(), routers()
    assert len(once) == case.hf_config["num_hidden_layers"]
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_shares_of_the_link_are_of_all_bytes_and_left_is_what_the_driver_did_not_get():
    trips = [Cycle(s, s, 2 * s, 0.0, released_bytes=10_000_000_000, host_bytes=0) for s in (1.0, 2.0, 9.0)]
    link = LinkSpeed(d2h_bytes_per_s=8e9, h2d_bytes_per_s=4e9)
    found = link_fields(trips, 12_000_000_000, 13_000_000_000, link)
    assert found == {"share_of_link_out": 0.75, "share_of_link_back": 0.75, "left_gb": 3.0}


def test_where_nothing_moves_neither_the_link_nor_what_is_left_is_given():
    assert [name for name, way in WAYS.items() if not way.moves] == ["resident", "resident, again"]
    assert set(link_fields([], 1, 1, None).values()) == {None}


def test_a_step_that_differs_shows_and_a_way_that_did_not_run_is_compared_with_nothing():
    found = [
        ({"way": "resident"}, [1.0, 2]),
        ({"way": "verl"}, [1.0, 3]),
        ({"way": "nemo_rl", "not_run": "there is no CUDA"}, []),
    ]
    assert [row.get("next_step_bit_equal") for row in adapters.compared(found)] == [True, False, None]
    assert [row.get("next_step_bit_equal") for row in adapters.compared(found[1:])] == [None, None]


def test_ten_thousand_tensors_are_as_many():
    """The optimizer makes a master and two moments for each of an expert's two weights."""
    sizes = CASES["experts, 10,000 tensors"].hf_config
    assert 3 * 2 * sizes["num_experts"] * sizes["num_hidden_layers"] == pytest.approx(10_000, rel=0.01)


def test_ours_comes_directly_behind_what_it_is_compared_with():
    names = [name.partition(",")[0] for name in WAYS]
    assert names[0] == adapters.RESIDENT
    for name in ("verl", "megatron_core", "nemo_rl"):
        assert names[names.index(name) + 1] == f"ours in {name}"
