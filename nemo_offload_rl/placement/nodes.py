"""Chooses the nodes of a Ray cluster for a run, and detects nodes that stop answering."""

import itertools
import os
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

DOMAIN_LABEL = "nvidia.com/gpu.clique"
"""Ray's node label with the name of the node's NVLink domain; NVIDIA's GPU feature discovery uses the same name."""

# NeMo-RL's Slurm script gives a node's domain, and its position there, as custom resources instead.
_DOMAIN_RESOURCE_PREFIX = "nvlink_domain_"
_PLACE_RESOURCE = "topo_rank"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings
_MANY = 64  # nodes that are queried at the same time


@dataclass(frozen=True)
class Node:
    """Describes a node of a Ray cluster.

    Attributes:
        id: Ray's identifier.
        address: the address by which other nodes reach it.
        port: the port of its raylet; 0 if Ray does not report it.
        domain: the name of its NVLink domain; None if it is not known.
        place: sort key of the nodes of a domain.
        num_slots: number of groups of `gpus_per_node` ranks that fit on the idle node.
        num_free_slots: number of such groups that fit now.
    """

    id: str
    address: str
    port: int = 0
    domain: str | None = None
    place: tuple[float, ...] = ()
    num_slots: int = 1
    num_free_slots: int = 1

    def __str__(self) -> str:
        return f"{self.address} ({self.id[:8]})"


def living_nodes(bundle: Mapping[str, float], gpus_per_node: int) -> list[Node]:
    """Returns the nodes that Ray counts as alive, and how many groups of ranks fit on each.

    Args:
        bundle: the resources that a rank requests, by Ray's names.
        gpus_per_node: ranks of a node.
    """
    free = ray._private.state.available_resources_per_node()

    def slots(resources: Mapping[str, float]) -> int:
        # Ray counts in steps of 0.0001; adding half a step allows for rounding.
        ranks = min(int((resources.get(name, 0.0) + 5e-5) / amount) for name, amount in bundle.items())
        return ranks // gpus_per_node

    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            port=node.get("NodeManagerPort", 0),
            domain=_domain(node),
            place=_place(node),
            num_slots=slots(node["Resources"]),
            num_free_slots=slots(free.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def that_answer(nodes: Sequence[Node], timeout_s: float) -> list[Node]:
    """Returns the nodes whose raylets answer, in the given order.

    Ray itself needs 65 s to notice a machine without power or network.

    Args:
        nodes: the nodes to query.
        timeout_s: seconds that an answer may take.
    """
    if len(nodes) < 2:  # this machine alone
        return list(nodes)
    with ThreadPoolExecutor(min(len(nodes), _MANY)) as pool:
        answers = pool.map(lambda node: answers_at(node.address, node.port, timeout_s), nodes)
        return [node for node, answered in zip(nodes, answers, strict=True) if answered]


def answers_at(address: str, port: int, timeout_s: float) -> bool:
    """Returns whether a gRPC server answers at the address; with Ray's TLS, only whether a connection succeeds.

    Returns True for an unknown port (0).
    """
    if not port:
        return True
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return True
            # The kernel accepts connections even if the server's process is stopped; only the process answers.
            connection.sendall(_HTTP2_GREETING)
            return bool(connection.recv(1))
    except OSError:
        return False


def choose_nodes(
    nodes: Sequence[Node], num_nodes: int, segment_size: int | None, num_slots: Callable[[Node], int]
) -> list[Node] | None:
    """Chooses the nodes of a run, in the order of its ranks.

    It prefers different nodes, and uses further slots of a node only if there are too few nodes. With segments, it
    chooses groups of `segment_size` consecutive nodes of one NVLink domain, from as few domains as possible.

    Args:
        nodes: the cluster's nodes.
        num_nodes: number of nodes to choose; a multiple of `segment_size`.
        segment_size: nodes of one NVLink domain; None and 1 ask for no domain.
        num_slots: returns how often a node can be chosen.

    Returns:
        The nodes; None if there are too few.
    """
    ordered = sorted((node for node in nodes if num_slots(node) > 0), key=lambda node: node.place)
    if segment_size is None or segment_size == 1:
        rounds = range(max(map(num_slots, ordered), default=0))
        choices = [node for number in rounds for node in ordered if num_slots(node) > number][:num_nodes]
        return sorted(choices, key=ordered.index) if len(choices) == num_nodes else None
    segments = list(itertools.islice(_segments(ordered, segment_size), num_nodes // segment_size))
    chosen = [node for segment in segments for node in segment]
    return chosen if len(chosen) == num_nodes else None


def why_too_few(nodes: Sequence[Node], num_nodes: int, gpus_per_node: int, segment_size: int | None) -> str:
    """Returns the error message for a cluster that is too small for a run: what it lacks, and the remedy.

    Args:
        nodes: the cluster's nodes.
        num_nodes: the recipe's number of nodes.
        gpus_per_node: the recipe's number of GPUs per node.
        segment_size: the recipe's segment size.
    """
    usable = [node for node in nodes if node.num_slots > 0]
    listed = ", ".join(str(node) for node in usable) or "none"
    if segment_size is None or segment_size == 1 or choose_nodes(nodes, num_nodes, None, _all_slots) is None:
        return (
            f"The recipe asks for {num_nodes} nodes (cluster.num_nodes) with {gpus_per_node} ranks each "
            f"(cluster.gpus_per_node), but of the Ray cluster's {len(nodes)} nodes only these have room for so many: "
            f"{listed}; start Ray on more nodes, or lower one of the two."
        )
    domains = Counter(node.domain for node in usable)
    unknown = domains.pop(None, 0)
    counts = ", ".join(f"{count} in {domain}" for domain, count in sorted(domains.items())) or "none"
    without = f"; {unknown} nodes have no such label" if unknown else ""
    return (
        f"The recipe asks for {num_nodes // segment_size} segments of {segment_size} nodes of one NVLink domain "
        f"(cluster.segment_size), but of the Ray cluster's nodes the label {DOMAIN_LABEL} puts {counts}{without}; "
        f"start Ray on each node with --labels={DOMAIN_LABEL}=NAME_OF_ITS_DOMAIN, or set cluster.segment_size to null."
    )


def require_gpus(num_found: int, num_nodes: int, gpus_per_node: int, where: str, *, needs_gpus: bool = False) -> None:
    """Checks the number of GPUs; none at all is fine unless `needs_gpus`, since ranks then run on the CPU.

    Args:
        num_found: GPUs that there are.
        num_nodes: the recipe's number of nodes.
        gpus_per_node: the recipe's number of GPUs per node.
        where: the place of the GPUs, for the message.
        needs_gpus: whether the run has begun on GPUs.

    Raises:
        ValueError: there are too few.
    """
    if num_found == 0 and needs_gpus:
        raise ValueError(
            f"The run began on GPUs, but {where} has none now, and the run does not go on without them; once it has "
            f"{num_nodes * gpus_per_node} (cluster.num_nodes {num_nodes} x cluster.gpus_per_node {gpus_per_node}), "
            "start the same command again."
        )
    if 0 < num_found < num_nodes * gpus_per_node:
        raise ValueError(
            f"The recipe asks for {num_nodes * gpus_per_node} GPUs (cluster.num_nodes {num_nodes} x "
            f"cluster.gpus_per_node {gpus_per_node}), but {where} has {num_found}; lower them, or join machines to a "
            "Ray cluster and set RAY_ADDRESS."
        )


def require_no_segments(segment_size: int | None) -> None:
    """Checks that the recipe asks for no segments of several nodes, since a Ray started here has only this machine."""
    if segment_size is not None and segment_size > 1:
        raise ValueError(
            f"The recipe asks for segments of {segment_size} nodes (cluster.segment_size), but Ray would be started on "
            "this machine alone; start a Ray cluster and set RAY_ADDRESS, or set cluster.segment_size to null."
        )


def require_one_node(num_nodes: int) -> None:
    """Checks that the recipe asks for no further node, since a Ray started here has only this machine."""
    if num_nodes > 1:
        raise ValueError(
            f"The recipe asks for {num_nodes} nodes (cluster.num_nodes), but Ray would be started on this machine "
            "alone; start a Ray cluster and set RAY_ADDRESS, or set cluster.num_nodes to 1."
        )


def _all_slots(node: Node) -> int:
    return node.num_slots


def _segments(ordered: Sequence[Node], segment_size: int) -> Iterator[tuple[Node, ...]]:
    of_domain: dict[str, list[Node]] = defaultdict(list)
    for node in ordered:
        if node.domain is not None:
            of_domain[node.domain].append(node)
    for domain in sorted(of_domain, key=lambda name: (-len(of_domain[name]), name)):
        for segment in itertools.batched(of_domain[domain], segment_size):
            if len(segment) == segment_size:
                yield segment


def _domain(node: Mapping[str, Any]) -> str | None:
    label = node.get("Labels", {}).get(DOMAIN_LABEL)
    if label:
        return str(label)
    resources = [name for name in node["Resources"] if name.startswith(_DOMAIN_RESOURCE_PREFIX)]
    return resources[0].removeprefix(_DOMAIN_RESOURCE_PREFIX) if resources else None


def _place(node: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns a node's sort key: NeMo-RL's number if there is one, otherwise the address; neighbours' are similar."""
    if _PLACE_RESOURCE in node["Resources"]:
        return (node["Resources"][_PLACE_RESOURCE],)
    address = node["NodeManagerAddress"]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return tuple(socket.inet_pton(family, address))
    except OSError:  # a name
        return tuple(address.encode())


_PERIOD_S = 2.0
_ANSWER_TIMEOUT_S = 5.0
_PATIENCE_S = 30.0


class NodeLostError(RayError):
    """Says that a node no longer answers."""


class NodeWatch:
    """Checks periodically, in a background thread, whether the raylets of nodes answer.

    If only a raylet has ended, Ray itself raises errors in the callers of its actors, mostly sooner.

    Args:
        nodes: the nodes to watch.
        period_s: seconds between checks.
        patience_s: seconds without an answer after which a node is lost.
    """

    def __init__(self, nodes: Sequence[Node], period_s: float = _PERIOD_S, patience_s: float = _PATIENCE_S) -> None:
        self.period_s = period_s
        self._nodes = list({node.id: node for node in nodes}.values())
        self._patience_s = patience_s
        self._losses: dict[str, NodeLostError] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)
        self._thread.start()

    @property
    def has_lost(self) -> bool:
        """Whether a node is lost."""
        return bool(self._losses)

    def loss_of(self, node: Node, *, ask: bool = False) -> NodeLostError | None:
        """Returns the error of a lost node, otherwise None; with `ask`, a node that does not answer now is lost."""
        if node.id not in self._losses and ask and not answers_at(node.address, node.port, _ANSWER_TIMEOUT_S):
            self._losses[node.id] = NodeLostError(f"node {node} does not answer")
        return self._losses.get(node.id)

    def close(self) -> None:
        """Ends the checks, without waiting for one in progress."""
        self._end.set()

    def _run(self) -> None:
        answered_s = dict.fromkeys((node.id for node in self._nodes), time.monotonic())
        while not self._end.wait(self.period_s):
            start_s = time.monotonic()
            answering = {node.id for node in that_answer(self._nodes, _ANSWER_TIMEOUT_S)}
            for node in self._nodes:
                if node.id in answering:
                    answered_s[node.id] = start_s
                elif time.monotonic() - answered_s[node.id] >= self._patience_s:
                    self._losses[node.id] = NodeLostError(f"node {node} has not answered for {self._patience_s:g} s")
