"""Lets only the driver react to the signals that end a run, not the processes that it has started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


@contextmanager
def ending_signals_blocked() -> Iterator[None]:
    """Blocks SIGINT, SIGTERM and SIGHUP inside the `with` block, and in all processes started inside it.

    A terminal sends these signals to a process group and a scheduler to all processes of a job, but only the driver
    should react: it ends the other processes when it is ready. Before that, only SIGKILL ends them.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def ignore_ending_signals() -> None:
    """Ignores SIGINT, SIGTERM and SIGHUP in an actor's process; to be called in its main thread from `__init__`.

    Blocked signals do not stay blocked there: multiprocessing's resource tracker, which checkpoint writers start,
    unblocks two of them in the process that starts it. Ray's own handlers, which end the process, are set before the
    actor's `__init__`.
    """
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
