"""Calls the ranks of a node on the driver's behalf, so that the driver's work grows with nodes and not with ranks."""

import itertools
import os
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.signals import ignore_ending_signals
from nemo_offload_rl.worker.wire import WireBatch


@dataclass(frozen=True)
class RankCalls:
    """Answers a call in place of results when a rank has failed: the driver waits for each rank itself.

    Attributes:
        refs: Ray's references to the ranks' results, in rank order.
    """

    refs: list[Any]


@dataclass(frozen=True)
class Part:
    """Describes what a call has for one rank.

    Attributes:
        shard: The place of its shard among those of its node.
        wants_result: Whether the driver uses its result.
    """

    shard: int
    wants_result: bool


class NodeRelay:
    """Passes calls on to the ranks of its node, in a process of its own: a rank that dies or hangs cannot stop it.

    If it ends itself, all of its ranks count as dead.
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
        parts: Sequence[Part],
        combine: Callable[[list[Any]], Any] | None,
        *_: Any,
    ) -> list[Any] | RankCalls:
        """Call a function on all ranks of the node, once Ray has resolved the further arguments; later calls wait.

        Args:
            pickled: The function, by cloudpickle.
            shards: One reference, to the shards of a batch that the node's ranks have, or None.
            parts: What is for each rank.
            combine: Makes one result of several; None to return them as they are.

        Returns:
            The wanted results in rank order, or what `combine` makes of them; `RankCalls` as soon as a rank has failed.
        """
        refs = _call_ranks(self._actors, pickled, shards[0], parts)
        try:
            results = concat(ray.get(refs))  # raises once a rank has failed, although others have not ended
        except RayError:
            return RankCalls(refs)
        return [combine(results)] if combine is not None else results


class Relays:
    """Calls all ranks: through a relay on each node, or itself if one node has them all.

    Args:
        rank_actors: Ray's handle of each rank's `WorkerActor`.
        cluster: Knows their nodes.

    Attributes:
        actors: The relays' actors; none on one node.
    """

    def __init__(self, rank_actors: Sequence[Any], cluster: Cluster) -> None:
        grouped = itertools.groupby(range(len(rank_actors)), key=lambda rank: cluster.node_of(rank).id)
        self._rank_actors = rank_actors
        self._nodes = [list(ranks) for _, ranks in grouped]
        self.actors: list[Any] = []
        if len(self._nodes) > 1:
            self.actors = [
                ray.remote(NodeRelay)
                .options(**cluster.options_beside(ranks[0]))
                .remote([rank_actors[rank] for rank in ranks])
                for ranks in self._nodes
            ]

    def call(
        self,
        call: Callable[..., Any],
        dp_ranks: Sequence[int],
        *,
        shards: Sequence[BatchedData] | None,
        wanted: Container[int],
        combine: Callable[[list[Any]], Any] | None,
        after: Sequence[Any],
    ) -> dict[Any, Sequence[int]]:
        """Calls a function on all ranks.

        Args:
            call: The function; what it refers to is sent to every rank.
            dp_ranks: The data-parallel rank of each rank.
            shards: A part of a batch for each data-parallel rank, or None.
            wanted: The ranks whose results are.
            combine: Makes one result of a node's; None to return them as they are.
            after: Ray's references to what has to end first.

        Returns:
            References to lists of wanted results, in rank order, each with the ranks that it is of.
        """
        pickled = cloudpickle.dumps(call)  # once: Ray would do so for each rank
        packed = None if shards is None else [WireBatch.pack(shard) for shard in shards]
        sent: dict[tuple[int, ...], Any] = {}  # a shard goes to the object store once, together with others of its node
        calls: dict[Any, Sequence[int]] = {}
        for node, ranks in enumerate(self._nodes):
            of_node = tuple(sorted({dp_ranks[rank] for rank in ranks}))
            if of_node not in sent:
                sent[of_node] = None if packed is None else ray.put([packed[dp_rank] for dp_rank in of_node])
            parts = [Part(of_node.index(dp_ranks[rank]), wants_result=rank in wanted) for rank in ranks]
            if self.actors:
                answer = self.actors[node].call.remote(pickled, [sent[of_node]], parts, combine, *after)
                calls[answer] = ranks
            else:
                calls = each_rank(_call_ranks(self._rank_actors, pickled, sent[of_node], parts, after))
        return calls


def _call_ranks(
    actors: Sequence[Any], pickled: bytes, shards: Any, parts: Sequence[Part], after: Sequence[Any] = ()
) -> list[Any]:
    return [actor.call.remote(pickled, shards, part, *after) for actor, part in zip(actors, parts, strict=True)]


def each_rank(refs: Sequence[Any]) -> dict[Any, Sequence[int]]:
    """Returns references to the ranks' results, given in rank order, each with its rank."""
    return {ref: (rank,) for rank, ref in enumerate(refs)}


def concat(lists: Sequence[list[Any]]) -> list[Any]:
    """Returns the elements of all lists."""
    return list(itertools.chain(*lists))
