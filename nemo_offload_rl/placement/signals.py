"""Signals that ask a run to end: the driver takes them, and what it has started does not."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


@contextmanager
def ending_signals_blocked() -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP wait; processes that are started inside, and theirs, have them blocked.

    A terminal sends them to a group of processes and a scheduler to all of a job, but the driver alone is to take
    notice: it ends the others when the time has come. SIGKILL is all that ends them before.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def ignore_ending_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP in an actor's process; call it in its main thread, when the actor is made.

    That they are blocked there does not last: multiprocessing's resource tracker, which writers of checkpoints start,
    unblocks two of them in its process. Ray's own handlers are set before the actor is made, and end the process.
    """
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
