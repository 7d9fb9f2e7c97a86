"""Tests two relays with two actors each: what a call brings to them, and what a failure brings back."""

import os
import sys
import time

import pytest
import ray
from ray import cloudpickle
from support.actors import kill_and_wait
from support.toy_group import ApartCluster

from nemo_offload_rl.placement import gather
from nemo_offload_rl.placement.gather import is_death
from nemo_offload_rl.placement.nodes import NodeLostError
from nemo_offload_rl.placement.relay import Relays, groups_of

pytestmark = pytest.mark.slow

# The actors cannot import this module, so Ray pickles its classes by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rank:
    def __init__(self, rank):
        self.rank, self.seen = rank, []

    def call(self, pickled, shards, part, *_):
        shard = None if shards is None else shards[part.shard]
        result = cloudpickle.loads(pickled)(self, shard)
        return [result] if part.wants_result else []


@pytest.fixture(params=[2, 1], ids=["a node each", "two nodes each"])
def apart(request, ray_cluster):
    return ApartCluster(ray_cluster, ranks_per_node=request.param)


@pytest.fixture
def ranks():
    actors = [ray.remote(Rank).options(num_cpus=0).remote(rank) for rank in range(4)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def relays(ranks, apart):
    made = Relays(dict(enumerate(ranks)), apart)
    yield made
    for actor in made.actors:
        ray.kill(actor)


def results(calls, cluster):
    found, failures = gather.gather(calls, cluster)
    assert not failures
    return found


@pytest.mark.parametrize(
    ("dp_ranks", "num_puts"),
    [([0, 1, 2, 3], 2), ([0, 0, 1, 1], 2), ([0, 1, 0, 1], 1), ([0, 0, 0, 0], 1), ([0, 1, 1, 2], 3)],
)
def test_each_rank_gets_its_shard_which_is_stored_once(relays, apart, monkeypatch, dp_ranks, num_puts):
    puts, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
    shards = [[dp_rank] for dp_rank in range(max(dp_ranks) + 1)]
    shard_of = dict(enumerate(dp_ranks))
    calls = relays.call(lambda rank, shard: (rank.rank, shard), shards=shards, shard_of=shard_of, wanted=(1, 2))
    assert [list(ranks) for ranks in calls.values()] == [[0, 1], [2, 3]]
    assert results(calls, apart) == [[(1, [dp_ranks[1]])], [(2, [dp_ranks[2]])]]
    assert len(puts) == num_puts
    assert sorted(shard for put_together in puts for shard in put_together) == shards


def test_results_are_combined_on_their_node(relays, apart):
    calls = relays.call(lambda rank, _: rank.rank, wanted=range(4), combine=sum)
    assert results(calls, apart) == [[1], [5]]


def test_a_call_waits_for_what_must_end_first_and_later_calls_wait_for_it(relays, apart):
    @ray.remote(num_cpus=0)
    def late():
        time.sleep(0.5)

    first = relays.call(lambda rank, _: rank.seen.append("return"), after=[late.remote()])
    relays.call(lambda rank, _: rank.seen.append("train"))
    seen = relays.call(lambda rank, _: rank.seen, wanted=(0, 3))
    assert results(seen, apart) == [[["return", "train"]]] * 2
    assert results(first, apart) == [[], []]


def fail_beside_a_rank_that_hangs(rank, _):
    if rank.rank == 3:
        raise ValueError(f"rank {rank.rank} has no memory")
    time.sleep(60)


def test_a_failure_is_that_of_its_rank_although_the_others_hang(relays, apart, monkeypatch):
    monkeypatch.setattr(gather, "FAILURE_GRACE_S", 0.3)
    start = time.monotonic()
    found, failures = gather.gather(relays.call(fail_beside_a_rank_that_hangs), apart)
    assert time.monotonic() - start < 30
    assert (found, list(failures)) == ([], [3])
    assert "rank 3 has no memory" in str(failures[3])


def test_a_rank_that_dies_is_named_and_a_relay_that_dies_takes_its_ranks_along(relays, ranks, apart, monkeypatch):
    monkeypatch.setattr(gather, "FAILURE_GRACE_S", 0.3)
    kill_and_wait(ranks[2])
    _, failures = gather.gather(relays.call(lambda rank, _: rank.rank), apart)
    assert [(rank, is_death(error)) for rank, error in failures.items()] == [(2, True)]
    kill_and_wait(relays.actors[0])
    _, failures = gather.gather(relays.call(lambda rank, _: rank.rank), apart)
    assert {rank for rank, error in failures.items() if is_death(error)} == {0, 1, 2}


def hang_on_a_lost_node(rank, _):
    if rank.rank == 1:
        time.sleep(600)


class LosesANode(ApartCluster):
    """Does not hear of the node of rank 1, with which others share a relay."""

    def wait(self, refs, timeout_s):
        return ray.wait(refs, timeout=0.2 if timeout_s is None else min(timeout_s, 0.2))

    def loss_of(self, bundle, *, ask=False):
        return NodeLostError("node 1 does not answer") if bundle == 1 else None


def test_only_actors_of_a_lost_node_are_named_although_its_relay_has_those_of_others(relays, ray_cluster, monkeypatch):
    monkeypatch.setattr(gather, "FAILURE_GRACE_S", 0.3)
    _, failures = gather.gather(relays.call(hang_on_a_lost_node), LosesANode(ray_cluster))
    assert [(rank, type(error)) for rank, error in failures.items()] == [(1, NodeLostError)]


@pytest.mark.parametrize(("num_nodes", "num_calls"), [(1, 1), (8, 8), (32, 16), (64, 22)])
def test_the_driver_calls_about_as_many_relays_as_a_relay_has_actors(num_nodes, num_calls):
    nodes = [list(range(8 * node, 8 * node + 8)) for node in range(num_nodes)]
    groups = groups_of(nodes)
    assert len(groups) == num_calls
    assert [bundle for group in groups for bundle in group] == list(range(8 * num_nodes))


class ReadOnlyHere:
    """Cannot be unpickled in another process than the one given."""

    def __init__(self, pid, value):
        self.pid, self.value = pid, value

    def __reduce__(self):
        return _value_in, (self.pid, self.value)


def _value_in(pid, value):
    if os.getpid() != pid:
        raise RuntimeError("no memory in the object store")
    return value


def test_results_that_a_relay_cannot_get_are_those_of_its_ranks(relays, apart):
    pid = os.getpid()

    def answer(rank, _):
        return ReadOnlyHere(pid, rank.rank) if rank.rank == 2 else rank.rank

    for combine, of_nodes in ((None, [[0, 1], [2, 3]]), (sum, [[1], [2, 3]])):  # the driver combines what is left
        calls = relays.call(answer, wanted=range(4), combine=combine)
        assert results(calls, apart) == of_nodes
