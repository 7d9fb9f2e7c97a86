"""Provides copy streams without a GPU that copy as late as their events allow, or at random times."""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch


class LateEvent:
    """Marks a point in a late stream's work; the work before it may not be done yet."""

    def __init__(self, stream: "LateStream", number: int) -> None:
        self._stream = stream
        self._number = number
        self._time = time.perf_counter()  # as events on a CPU do

    def wait(self) -> None:
        self._stream.run(self._number)

    def wait_on_current_stream(self) -> None:
        self.wait()

    def hold(self, stream: Any) -> None:
        raise AssertionError("a late stream follows by itself")

    def seconds_since(self, earlier: Any) -> float:
        return 1.0


class LateStream:
    stream = None

    def __init__(self, device: torch.device) -> None:
        self._random = random.Random(id(type(self)) % 7)
        self._queue: deque[Callable[[], None]] = deque()
        self._num_done = 0

    def follow_current_stream(self) -> None:
        """Does nothing: computation on a CPU is done when the call returns."""

    def follow(self, mark: LateEvent) -> None:
        self._queue.append(mark.wait)

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for destination, source in pairs:
            self._queue.append(lambda destination=destination, source=source: destination.copy_(source))
        if self._random.random() < 0.2:
            self.run(self._num_done + self._random.randrange(len(self._queue)))

    def mark(self, *, spins: bool = False) -> LateEvent:
        return LateEvent(self, self._num_done + len(self._queue))

    def run(self, number: int) -> None:
        """Does the first `number` pieces of work that this stream was ever given."""
        while self._num_done < number:
            work = self._queue.popleft()
            self._num_done += 1
            work()
