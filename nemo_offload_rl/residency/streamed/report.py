"""Measures a streamed step as if it were a target's move."""

import dataclasses

from nemo_offload_rl.memory.streams import Event


@dataclasses.dataclass(eq=False)
class StepTransfer:
    """Measures the copies of one step, both ways; implements `residency.target.Move`.

    Attributes:
        nbytes: bytes that crossed the link, in both directions together.
        begin: the first copy's beginning.
        end: the last copy's end.
        filled: the end of the last copy into the window before the step.
        asked: the point at which the compute stream began the step.
        updated: the point at which the compute stream had made the last update.
    """

    nbytes: int
    begin: Event
    end: Event
    filled: Event
    asked: Event
    updated: Event

    is_queued = True
    has_failed = False

    def wait(self) -> None:
        """Does nothing: the next step's copies follow those of this step."""

    def wait_on_current_stream(self) -> None:
        """Makes later work of the current stream wait for all copies to the host."""
        self.end.wait_on_current_stream()

    def copy_seconds(self) -> float:
        """Returns the seconds from the first byte on the link to the last, less the wait of the full window."""
        self.end.wait()
        return self.end.seconds_since(self.begin) - max(0.0, self.asked.seconds_since(self.filled))

    def exposed_seconds(self) -> float:
        """Returns the seconds of the step on the compute stream; the last copies out overlap with later work."""
        self.updated.wait()
        return max(0.0, self.updated.seconds_since(self.asked))
