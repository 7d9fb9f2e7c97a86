"""Lets an engine's weights change while it generates: between two of its steps."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepGate:
    """Holds a generation between two steps while another thread brings weights.

    All processes of a replica hold at the same step, or their shares of a layer would have different weights: they do
    once weights wait in one of them, since a `hold` that came before its process's first step has returned already.
    `hold` has returned in all of them before weights come, and `release` follows in all of them.

    Args:
        agree: returns whether any process of the replica has passed True; collective.
    """

    def __init__(self, agree: Callable[[bool], bool] = bool) -> None:
        self._agree = agree
        self._changed = threading.Condition()
        self._is_generating = False
        self._is_holding = False
        self._is_wanted = False
        self.num_updates = 0
        self.held_s = 0.0
        """Seconds for which the generation under way, or the last one, has been held."""

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Marks a generation, which begins once weights that are under way have come."""
        with self._changed:
            self._is_generating = True
        try:
            self.between_steps()
            self.held_s = 0.0
            yield
        finally:
            with self._changed:
                self._is_generating = False
                self._changed.notify_all()

    def between_steps(self) -> bool:
        """Waits while weights are brought; a generation calls it before each step.

        Returns:
            Whether the weights have changed.
        """
        with self._changed:
            wanted, before = self._is_wanted, self.num_updates
        if not self._agree(wanted):
            return False
        start = time.perf_counter()
        with self._changed:
            self._is_holding = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.num_updates > before)
        self.held_s += time.perf_counter() - start
        return True

    def hold(self) -> None:
        """Returns once no step is under way; none begins before `release`."""
        with self._changed:
            self._is_wanted = True
            self._changed.wait_for(lambda: self._is_holding or not self._is_generating)

    def release(self) -> None:
        """Lets a generation go on with the weights that have come since `hold`; without one it does nothing."""
        with self._changed:
            if self._is_wanted:
                self._is_wanted = False
                self._is_holding = False  # not where it wakes up: a `hold` that comes sooner would take it as its own
                self.num_updates += 1
                self._changed.notify_all()
