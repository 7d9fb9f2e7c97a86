"""Detects nodes that stop answering; Ray needs 65 s for that, and ranks in a collective half an hour."""

import threading
import time
from collections.abc import Sequence

from ray.exceptions import RayError

from nemo_offload_rl.placement.nodes import Node, answers_at, that_answer

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
