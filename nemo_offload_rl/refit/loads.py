"""What engines are loading, so that the sender can go on meanwhile."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from nemo_offload_rl.refit.interface import Receiver

_SETTLE_TIMEOUT_S = 60


class Loads:
    """Tracks the buckets of one refit that receivers are loading.

    Args:
        receivers: All of them get every bucket.
        limit: The most buckets that are under way.
    """

    def __init__(self, receivers: Sequence[Receiver], limit: int) -> None:
        self._receivers = receivers
        self._limit = limit
        self._under_way: deque[list[Any]] = deque()  # a list of references for each bucket
        self.seconds = 0.0
        """Of all loads that have ended; of each bucket the slowest receiver's."""

    @contextmanager
    def settled(self) -> Iterator[None]:
        """At the end no receiver has a bucket open, whose memory may then go; an error inside does not change that."""
        try:
            yield
        finally:
            left = [reference for references in self._under_way for reference in references]
            if left:
                ray.wait(left, num_returns=len(left), timeout=_SETTLE_TIMEOUT_S)

    def wait_for_room(self) -> None:
        """Wait until one more bucket may be under way."""
        while len(self._under_way) >= self._limit:
            self._wait_for_first()

    def start(self, bucket: Any) -> None:
        """Give a bucket to every receiver."""
        self._under_way.append([receiver.load_weights(bucket) for receiver in self._receivers])

    def wait(self) -> None:
        """Wait until all has been loaded."""
        while self._under_way:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        self.seconds += max(ray.get(self._under_way.popleft()))
