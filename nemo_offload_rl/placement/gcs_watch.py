"""Ends the driver with a message when Ray's GCS, the process that runs a Ray cluster, is gone."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

_PERIOD_S = 2.0
_CONNECT_TIMEOUT_S = 5.0


class GcsWatch:
    """Checks periodically, inside its `with` block, in a thread, whether the GCS takes connections.

    A GCS that is only slow takes them, too: the kernel does it. Ray does not give up on it either.

    Without the GCS Ray aborts the process after a minute, from C++: no error reaches Python, and calls into Ray may
    hang meanwhile, a few of them with the interpreter's lock, so that this thread cannot run either. So this ends the
    process, too, but sooner, and says why. The reaper then ends Ray's processes.

    Args:
        address: host and port of the GCS.
        message: returns what to say.
        patience_s: seconds without a connection after which the GCS is gone.
        period_s: seconds between checks.
        end: called with the message; does not return in a run.
    """

    def __init__(
        self,
        address: str,
        message: Callable[[], str],
        *,
        patience_s: float,
        period_s: float = _PERIOD_S,
        end: Callable[[str], None] | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._message = message
        self._patience_s = patience_s
        self._period_s = period_s
        self._end_process = _end if end is None else end
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gcs-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()

    def _run(self) -> None:
        connected_s = time.monotonic()
        while not self._end.wait(self._period_s):
            start_s = time.monotonic()
            if self._connects():
                connected_s = start_s
            elif time.monotonic() - connected_s >= self._patience_s and not self._end.is_set():
                self._end_process(self._message())
                return

    def _connects(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError:
            return False
        return True


def _end(message: str) -> None:
    os.write(2, f"{message}\n".encode())
    os._exit(1)
