"""Calls actors on the driver's behalf, so that the driver's work grows with the square root of their number.

The actors are ranks of the policy, or processes of engines. Each has a method `call(pickled, shards, part, *after)`.
"""

import itertools
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.signals import ignore_ending_signals


@dataclass(frozen=True)
class ActorCalls:
    """Answers a call in place of results when an actor has failed: the driver waits for each actor itself.

    Attributes:
        refs: Ray's references to the actors' results, in their order.
    """

    refs: list[Any]


@dataclass(frozen=True)
class Part:
    """Describes what a call has for one actor.

    Attributes:
        shard: The place of its shard in a list of shards.
        wants_result: Whether the driver uses its result.
        stored: The place of that list's reference among those of its relay.
    """

    shard: int
    wants_result: bool
    stored: int = 0


class Relay:
    """Passes calls on to the actors of some nodes, in a process of its own: one that dies or hangs cannot stop it.

    If it ends itself, all of its actors count as dead.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        ignore_ending_signals()
        self._actors = actors

    def process(self) -> tuple[str, int]:
        """Returns this node's address and this process's id."""
        return ray.util.get_node_ip_address(), os.getpid()

    def call(
        self,
        pickled: bytes,
        shards: Sequence[Any],
        parts: bytes,
        combine: Callable[[list[Any]], Any] | None,
        thread: str | None,
        *_: Any,
    ) -> list[Any] | ActorCalls:
        """Call all of its actors, once Ray has resolved the further arguments; later calls wait.

        Args:
            pickled: What the actors do, by cloudpickle.
            shards: References to lists of its actors' shards; a single None for a call without any.
            parts: What is for each actor, pickled together: Ray would pickle each `Part`, in six times the time.
            combine: Makes one result of several; None to return them as they are.
            thread: The actors' concurrency group for this call; None for their main one.

        Returns:
            The wanted results in order, or what `combine` makes of them; `ActorCalls` as soon as an actor has failed.
        """
        refs = _call_actors(self._actors, pickled, shards, pickle.loads(parts), thread)
        try:
            results = concat(ray.get(refs))  # raises once an actor has failed, although others have not ended
        except RayError:
            return ActorCalls(refs)
        return [combine(results)] if combine is not None else results


class Relays:
    """Calls all actors: through relays of some nodes each, or itself if one node has them all.

    Args:
        actors: Ray's handle of each actor, by its bundle; those of a node follow each other.
        cluster: Knows the bundles' nodes.
        thread: A concurrency group of the actors whose calls run beside all others; None if they have none.

    Attributes:
        actors: The relays' actors; none on one node.
    """

    def __init__(self, actors: Mapping[int, Any], cluster: Cluster, *, thread: str | None = None) -> None:
        grouped = itertools.groupby(actors, key=lambda bundle: cluster.node_of(bundle).id)
        self._actors_by_bundle = dict(actors)
        nodes = [list(bundles) for _, bundles in grouped]
        self._groups = groups_of(nodes)
        self.actors: list[Any] = []
        if len(nodes) > 1:
            relay_class = remote_class(Relay, thread)
            self.actors = [
                relay_class.options(**cluster.options_beside(bundles[0])).remote([actors[one] for one in bundles])
                for bundles in self._groups
            ]

    def call(
        self,
        call: Any,
        *,
        shards: Sequence[Any] | None = None,
        shard_of: Mapping[int, int] | None = None,
        wanted: Container[int] = (),
        combine: Callable[[list[Any]], Any] | None = None,
        after: Sequence[Any] = (),
        thread: str | None = None,
    ) -> dict[Any, Sequence[int]]:
        """Calls all actors.

        Args:
            call: What an actor does, as its class reads it; what it refers to is sent to every actor.
            shards: The parts of the call's data, as they are sent; None without any.
            shard_of: The number of each actor's shard, by bundle; None without any.
            wanted: The bundles of the actors whose results are.
            combine: Makes one result of a relay's; None to return them as they are.
            after: Ray's references to what has to end first.
            thread: The actors' concurrency group for this call; None for their main one.

        Returns:
            References to lists of wanted results, in the actors' order, each with the bundles that it is of.
        """
        pickled = cloudpickle.dumps(call)  # once: Ray would do so for each actor
        if shards is None or shard_of is None:
            stored, places, shard_of = [None], {0: (0, 0)}, dict.fromkeys(self._actors_by_bundle, 0)
        else:
            stored, places = _store(shards, [{shard_of[one] for one in bundles} for bundles in self._groups])
        calls: dict[Any, Sequence[int]] = {}
        for number, bundles in enumerate(self._groups):
            places_of = [places[shard_of[bundle]] for bundle in bundles]
            lists = sorted({one for one, _ in places_of})
            refs_of_shards = [stored[one] for one in lists]
            parts = [
                Part(place, wants_result=bundle in wanted, stored=lists.index(one))
                for bundle, (one, place) in zip(bundles, places_of, strict=True)
            ]
            if self.actors:
                method = _method(self.actors[number], thread)
                answer = method.remote(pickled, refs_of_shards, pickle.dumps(parts), combine, thread, *after)
                calls[answer] = bundles
            else:
                actors = [self._actors_by_bundle[bundle] for bundle in bundles]
                refs = _call_actors(actors, pickled, refs_of_shards, parts, thread, after)
                calls = each_alone(refs, bundles)
        return calls


def groups_of(nodes: Sequence[list[int]]) -> list[list[int]]:
    """Returns the bundles of each relay, given those of each node.

    The driver calls about as many relays as a relay has actors: other numbers take longer until all are called.
    """
    num_actors = sum(map(len, nodes))
    return [concat(some) for some in itertools.batched(nodes, max(1, round(len(nodes) / math.sqrt(num_actors))))]


def _store(shards: Sequence[Any], needed: Sequence[set[int]]) -> tuple[list[Any], dict[int, tuple[int, int]]]:
    """Stores each shard once, in a list with others that the same relays need.

    Args:
        shards: All shards.
        needed: The numbers of each relay's shards.

    Returns:
        References to the lists, and for each shard the number of its list and its place there.
    """
    relays_of: dict[int, list[int]] = defaultdict(list)
    for relay, numbers in enumerate(needed):
        for shard in sorted(numbers):
            relays_of[shard].append(relay)
    lists: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for shard, relays in relays_of.items():
        lists[tuple(relays)].append(shard)
    places = {shard: (one, place) for one, some in enumerate(lists.values()) for place, shard in enumerate(some)}
    return [ray.put([shards[shard] for shard in some]) for some in lists.values()], places


def _call_actors(
    actors: Sequence[Any],
    pickled: bytes,
    shards: Sequence[Any],
    parts: Sequence[Part],
    thread: str | None,
    after: Sequence[Any] = (),
) -> list[Any]:
    methods = [_method(actor, thread) for actor in actors]
    return [
        method.remote(pickled, shards[part.stored], part, *after) for method, part in zip(methods, parts, strict=True)
    ]


def _method(actor: Any, thread: str | None) -> Any:
    return actor.call if thread is None else actor.call.options(concurrency_group=thread)


def remote_class(actor: type, thread: str | None) -> Any:
    """Returns Ray's class of an actor; calls in the concurrency group `thread` have a thread of their own."""
    return ray.remote(actor) if thread is None else ray.remote(concurrency_groups={thread: 1})(actor)


def each_alone(refs: Sequence[Any], bundles: Iterable[int] | None = None) -> dict[Any, Sequence[int]]:
    """Returns references to the results of single actors, each with its actor's bundle; None for 0, 1, ..."""
    numbers = range(len(refs)) if bundles is None else bundles
    return {ref: (bundle,) for ref, bundle in zip(refs, numbers, strict=True)}


def concat(lists: Sequence[list[Any]]) -> list[Any]:
    """Returns the elements of all lists."""
    return list(itertools.chain(*lists))
