"""Marks of plain numbers, in the place of a stream's."""

from nemo_offload_rl.memory.streams import Event


class At(Event):
    """A mark at a known time, which can be read once it has been waited for, or one behind it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.was_waited_for = False

    def wait(self) -> None:
        self.was_waited_for = True

    def seconds_since(self, earlier: Event) -> float:
        assert self.was_waited_for
        assert isinstance(earlier, At)
        return self.seconds - earlier.seconds
