"""Handles the signals that end a run: SIGINT (Ctrl-C), SIGTERM (from a scheduler) and SIGHUP (a closed terminal).

This module imports only the standard library, so that the handlers are installed before slow imports begin.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self


@dataclass
class Progress:
    """Counts the finished steps of a run, and those that are saved.

    ``str()`` says which steps are lost if the run ends now, and from where the same command would continue.

    Attributes:
        name: the run's name in messages.
        num_done: finished steps.
        in_step: whether a further step is in progress.
        num_saved: finished steps that are on disk: in the newest checkpoint, or in the model of a finished warm start.
        checkpoint: the newest checkpoint, or None.
        saves: whether checkpoints are written.
    """

    name: str = "run"
    num_done: int = 0
    in_step: bool = False
    num_saved: int = 0
    checkpoint: Path | None = None
    saves: bool = True

    @property
    def num_lost(self) -> int:
        """Number of steps that are lost if the run ends now, including an unfinished one."""
        return self.num_done + self.in_step - self.num_saved

    def __str__(self) -> str:
        """Returns two sentences: which steps are lost, and where the same command continues."""
        return f"{self._lost()} {self._next()}"

    def _lost(self) -> str:
        first, last = self.num_saved + 1, self.num_done + self.in_step
        if last < first:
            return "No step is lost."
        steps = f"Step {last} is" if first == last else f"Steps {first} to {last} are"
        unfinished = "" if not self.in_step else " (unfinished)" if first == last else f" ({last} unfinished)"
        since = "" if self.checkpoint is None else f" since {self.checkpoint}"
        verb = steps.rsplit(" ", 1)
        return f"{verb[0]}{since}{unfinished} {verb[1]} lost."

    def _next(self) -> str:
        if self.checkpoint is not None:
            return f"The same command resumes from {self.checkpoint}."
        why = "" if self.saves or self.num_lost == 0 else " (checkpointing.enabled is false)"
        return f"The same command starts the {self.name} from the beginning{why}."


logger = logging.getLogger(__name__)

# `timeout`, uv and make forward the signal that the terminal has already sent to the whole process group, so that one
# key press arrives twice.
_ONE_PRESS_S = 0.5
# A library may catch the exception that a handler raises, or native code may never return to Python.
_STUCK_S = 10.0


class Stopped(KeyboardInterrupt):
    """Ends the run at once; raised by `Interrupt`."""


class Interrupt:
    """Stops a run on a signal, inside its `with` block: at the end of a step that is in progress, otherwise at once.

    Inside ``finishing`` the first signal only sets ``requested``, and the step and its checkpoint are completed. A
    second Ctrl-C, or the end of the grace period after SIGTERM or SIGHUP, stops the run at once. A SIGHUP that was
    ignored before, as under nohup, stays ignored.

    Args:
        clock: returns the time in seconds.
        stuck_s: seconds after which a stopped run that has not ended is ended without any cleanup; the processes that
            the driver has started end with it.

    Attributes:
        requested: whether a signal has asked the run to end.
        stopped: whether the run was told to end at once.
        signal: the first signal, or None.
        progress: the steps that are lost if the run stops at once.
        grace_period_s: seconds that a step and its checkpoint may take after SIGTERM or SIGHUP; None for no limit.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, stuck_s: float = _STUCK_S) -> None:
        self.requested = False
        self.stopped = False
        self.signal: signal.Signals | None = None
        self.progress = Progress()
        self.grace_period_s: float | None = None
        self._clock = clock
        self._stuck_s = stuck_s
        self._finishing = False
        self._closing = False
        self._grace_is_over = False
        self._first_s = 0.0
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> Self:
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        for number, previous in self._previous.items():
            if not (number == signal.SIGHUP and previous is signal.SIG_IGN):
                signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for timer in self._timers:
            timer.cancel()
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Delays the effect of a first signal: inside the `with` block, it only sets ``requested``."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def close(self) -> None:
        """Stops reacting to signals, since the run is ending anyway."""
        self._closing = True

    def reopen(self) -> None:
        """Reacts to signals again, for a run that restarts; stops it now if a signal has arrived meanwhile."""
        self._closing = False
        self.check()

    def check(self) -> None:
        """Stops now if a signal has arrived; called after long calls into libraries, which may catch `Stopped`."""
        if self.signal is not None:
            self._stop()

    @property
    def exit_status(self) -> int:
        """Exit status of a run that a signal has ended: 128 + its number; 1 after a Ctrl-C that loses steps."""
        number = self.signal or signal.SIGINT
        return 1 if number == signal.SIGINT and self.progress.num_lost else 128 + number

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._closing:
            self.signal = self.signal or signal.Signals(number)  # for `reopen`
            return
        if not self.requested:
            self.requested = True
            self.signal = signal.Signals(number)
            self._first_s = self._clock()
            if not self._finishing:
                logger.warning("%s: stopping.", self._word)
                self._stop()
            self._finish_step()
        elif self._grace_is_over:
            logger.warning("The step and its checkpoint took longer than checkpointing.grace_period_s: stopping now.")
            self._stop()
        elif number == signal.SIGINT and self._clock() - self._first_s >= _ONE_PRESS_S:
            logger.warning("Interrupted again: stopping now.")
            self._stop()

    @property
    def _word(self) -> str:
        return "Interrupted" if self.signal is None or self.signal == signal.SIGINT else self.signal.name

    def _finish_step(self) -> None:
        if self.signal == signal.SIGINT:
            logger.warning("Interrupted: finishing this step and saving. Press Ctrl-C again to stop at once.")
        elif self.grace_period_s is None:
            logger.warning("%s: finishing this step and saving.", self._word)
        else:
            logger.warning(
                "%s: finishing this step and saving, for at most %g s (checkpointing.grace_period_s).",
                self._word,
                self.grace_period_s,
            )
            self._after(self.grace_period_s, self._end_grace)

    def _end_grace(self) -> None:
        """Ends the grace period; sends the signal to the main thread, since only that may stop the run."""
        main = threading.main_thread().ident
        if self._finishing and main is not None and self.signal is not None:
            self._grace_is_over = True
            self._after(self._stuck_s, self._end_process)
            signal.pthread_kill(main, self.signal)

    def _stop(self) -> None:
        self.stopped = True
        self._after(self._stuck_s, self._end_process)
        raise Stopped

    def _end_process(self) -> None:
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"The run did not stop within {self._stuck_s:g} s and is killed. {self.progress}\n".encode())
        os._exit(self.exit_status)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
