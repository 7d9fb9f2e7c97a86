"""Cleans up behind an error without replacing it."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def preserve_first_error() -> Iterator[None]:
    """Keeps the first error the one that is raised, though cleaning up behind it fails as well.

    "Behind" is while it is on its way, and where an `except` block handles it: after that block the failures in
    here are in the log alone.

    Nested exit stacks lose it otherwise: each takes the error that its caller is handling out of the context of the one
    that it raises. What fails inside then becomes a note on it, and a line of the log.
    """
    first = sys.exception()
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        text = "".join(traceback.format_exception(error)).rstrip()  # a record must not keep frames, and their tensors
        logger.error("cleaning up behind an error (%s) failed, too:\n%s", type(first).__name__, text)
        first.add_note(f"Cleaning up behind it failed, too: {type(error).__name__}: {error}")
