"""Relays the ranks' log records to the driver, whose log file and console a user reads."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

PACKAGE = "nemo_offload_rl"
_MOST_RECORDS = 1000  # that a rank keeps until they are taken; older ones are dropped
_TIMEOUT_S = 2.0

Record = tuple[int, str, str]
"""Level, name of the logger, message."""


class RankLog(logging.Handler):
    """Keeps this package's log records of a rank's process until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: deque[Record] = deque(maxlen=_MOST_RECORDS)

    def listen(self) -> None:
        """Start to keep log records."""
        log = logging.getLogger(PACKAGE)
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self._records.append((record.levelno, record.name, record.getMessage()))

    def take(self) -> list[Record]:
        """Returns the records since the last call."""
        taken = list(self._records)
        self._records.clear()
        return taken


def relay(actors: Sequence[Any]) -> None:
    """Log in this process what the ranks have logged since the last call; busy or dead ranks are skipped.

    Args:
        actors: handles of `WorkerActor`, one a rank.
    """
    if not actors:
        return
    rank_of = {actor.take_log.remote(): rank for rank, actor in enumerate(actors)}
    answered, _ = ray.wait(list(rank_of), num_returns=len(rank_of), timeout=_TIMEOUT_S)
    for ref in sorted(answered, key=lambda ref: rank_of[ref]):
        try:
            records: list[Record] = ray.get(ref)
        except RayError:  # the call under way on this rank reports its death
            continue
        for level, name, message in records:
            logging.getLogger(name).log(level, "rank %d: %s", rank_of[ref], message)
