"""Stands for the engines of a run that replays rollouts."""

from collections.abc import Sequence
from typing import Any


class NoEngine:
    """Implements what a step asks of engines besides answers: there is nothing to do."""

    def start_finish_generation(self) -> Sequence[Any]:
        """Returns no references: there is nothing to wait for."""
        return ()

    def finish_generation(self) -> None:
        """Does nothing."""

    def memory_stats(self) -> dict[str, float]:
        """Returns no memory."""
        return {}

    def shutdown(self) -> None:
        """Does nothing."""
