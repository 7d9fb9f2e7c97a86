"""Runs one call beside others, in a thread that lasts."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundCall:
    """Has at most one call under way; its error is raised where it is waited for.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._under_way: Future[None] | None = None

    def start(self, call: Callable[[], None]) -> None:
        """Begin a call; the last one has been waited for."""
        assert self._under_way is None, "a call is under way"
        self._under_way = self._executor.submit(call)

    def wait(self) -> None:
        """Wait for the call under way, if there is one, and raise what it raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()
