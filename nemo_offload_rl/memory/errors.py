"""Keeps the original error when cleaning up after it fails as well."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def preserve_first_error() -> Iterator[None]:
    """Keeps the original error the one that propagates when cleanup inside this context fails as well.

    This applies while an error is propagating or an `except` block is handling one. A cleanup failure is then logged
    and added to the original error as a note. If the `except` block does not raise again, it is in the log only.

    Without this, nested exit stacks lose the original error: each stack removes the error that its caller is handling
    from the `__context__` of the error that it raises.
    """
    first = sys.exception()
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        text = "".join(traceback.format_exception(error)).rstrip()  # a log record must not keep frames' tensors
        logger.error("cleanup after an error (%s) failed, too:\n%s", type(first).__name__, text)
        first.add_note(f"Cleanup after this error failed, too: {type(error).__name__}: {error}")
