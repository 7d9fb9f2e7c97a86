"""Ctrl-C: once to stop after the step, twice to stop now."""

from __future__ import annotations

import logging
import signal
from types import FrameType, TracebackType
from typing import Self

logger = logging.getLogger(__name__)


class Interrupt:
    """While it is entered, the first SIGINT is only noted, and the second raises KeyboardInterrupt.

    Attributes:
        requested: whether there was one.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._previous_handler = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("Interrupted: finishing this step and saving. Press Ctrl-C again to stop at once.")
