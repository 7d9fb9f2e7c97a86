"""How long a stream was held up by what it waited for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nemo_offload_rl.memory.streams import Event


@dataclass
class Waits:
    """What a clock has read; 0 until it has been stopped."""

    seconds_waited: float = 0.0
    """All waits together; some microseconds are counted for one that held nothing up."""
    seconds: float = 0.0
    """From start to stop."""


class WaitClock:
    """Times waits of the caller's stream, and all that the stream is given meanwhile.

    Args:
        mark: makes a mark in the stream that is current when it is called. Streams and threads may be several, as in
            backward passes, as long as each of them events both ends of a wait.
    """

    def __init__(self, mark: Callable[[], Event]) -> None:
        self._mark = mark
        self._held: list[tuple[Event, Event]] = []

    @contextmanager
    def running(self) -> Iterator[Waits]:
        """Start and stop; what it yields is filled in at the end, when the stream has got there."""
        waits = Waits()
        start = self._mark()
        yield waits
        stop = self._mark()
        stop.wait()
        waits.seconds = stop.seconds_since(start)
        for before, after in self._held:
            after.wait()  # it may be of another stream
            waits.seconds_waited += after.seconds_since(before)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """The stream is told to wait inside; not in a capture, where events have no time."""
        before = self._mark()
        yield
        self._held.append((before, self._mark()))
