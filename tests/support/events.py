"""Provides events with times given as plain numbers, in place of a stream's events."""

from nemo_offload_rl.memory.streams import Event


class At(Event):
    """Represents an event at a known time, readable once this event or a later one has been waited for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.was_waited_for = False

    def wait(self) -> None:
        self.was_waited_for = True

    def seconds_since(self, earlier: Event) -> float:
        assert self.was_waited_for
        assert isinstance(earlier, At)
        return self.seconds - earlier.seconds
