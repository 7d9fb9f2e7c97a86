"""Relays the ranks' log records to the driver, whose log file and console a user reads."""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

PACKAGE = "nemo_offload_rl"
_MOST_RECORDS = 1000  # that a rank keeps until they are taken; older ones are dropped
_TIMEOUT_S = 2.0

Record = tuple[int, int, str, str]
"""Rank, level, name of the logger, message."""


class RankLog(logging.Handler):
    """Keeps this package's log records of a rank's process until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._rank = int(os.environ.get("RANK", "0"))
        self._records: deque[Record] = deque(maxlen=_MOST_RECORDS)

    def listen(self) -> None:
        """Start to keep log records."""
        log = logging.getLogger(PACKAGE)
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self._records.append((self._rank, record.levelno, record.name, record.getMessage()))

    def take(self) -> list[Record]:
        """Returns the records since the last call."""
        taken = list(self._records)
        self._records.clear()
        return taken


def take_records() -> list[Record]:
    """Returns what this process, a rank, has logged since the last call."""
    logs = [handler for handler in logging.getLogger(PACKAGE).handlers if isinstance(handler, RankLog)]
    return [record for log in logs for record in log.take()]


def log_records(records: Iterable[Record]) -> None:
    """Log ranks' records in this process."""
    for rank, level, name, message in records:
        logging.getLogger(name).log(level, "rank %d: %s", rank, message)


def fetch_records(actors: Sequence[Any]) -> None:
    """Log in this process what the ranks have logged since the last call; busy or dead ranks are skipped.

    Args:
        actors: handles of `WorkerActor`, one a rank.
    """
    if not actors:
        return
    refs = [actor.take_log.remote() for actor in actors]
    answered, _ = ray.wait(refs, num_returns=len(refs), timeout=_TIMEOUT_S)
    for ref in answered:  # in the order of the refs
        with contextlib.suppress(RayError):  # the call under way on this rank reports its death
            log_records(ray.get(ref))
