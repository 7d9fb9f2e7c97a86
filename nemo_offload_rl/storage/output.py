"""Lets a process outlive the reader of its output: what cannot be printed is left out."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from nemo_offload_rl.storage.disk import is_disk_full

logger = logging.getLogger(__name__)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Makes standard output and error streams that do not fail, inside the `with` block.

    The reader of a pipe may end (``| less``), a terminal may be closed, and the disk of a file may be full. Where the
    reader is gone, the whole process writes to ``/dev/null`` from then on; a file gets what its disk has room for, and
    a pipe that does not block what it has room for.
    """
    streams = sys.stdout, sys.stderr
    named = zip(streams, ("standard output", "standard error"), strict=True)
    # A process that was started without a stream (`>&-`) has None, to which print writes nothing.
    lasting = [None if stream is None else _Lasting(stream, name) for stream, name in named]
    sys.stdout, sys.stderr = cast(list[TextIO], lasting)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for one in filter(None, lasting):
            one.end()


class _Lasting:
    """Writes to a stream as long as that can be written."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, or drops it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Writes what is pending, or drops it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def end(self) -> None:
        """Drops text that cannot be written now, since Python would end the process with status 120 for it."""
        try:
            self._stream.flush()
        except OSError:
            self._redirect()

    def _give_up(self, error: OSError) -> None:
        if not (is_disk_full(error) or isinstance(error, BlockingIOError)):
            self._redirect()
            logger.info("The process goes on without its %s, which cannot be written: %s.", self._name, error.strerror)

    def _redirect(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
