"""Provides limits of the system for tests that exceed them."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Refuses longer files while they are written, as `ulimit -f` or a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
