"""Provides a copy engine without a GPU that copies as late, and in any order, as its callers' handles allow."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.activation_offload.copies import CopyEngine, CopyHandle, Span
from nemo_offload_rl.activation_offload.storage import PinnedHostPool
from nemo_offload_rl.memory.streams import Waits

GARBAGE = 0xFF
"""Not a number, in bf16 and in float32."""


class LateTicket:
    """Tracks copies that may not have been made yet."""

    def __init__(self, copy: Callable[[], None], after: Iterable[CopyHandle]) -> None:
        self._copy: Callable[[], None] | None = copy
        self._after = list(after)

    def reached(self) -> bool:
        return self._copy is None

    def covers(self, other: CopyHandle) -> bool:
        return other is self

    def run(self) -> None:
        copy, self._copy = self._copy, None
        if copy is None:
            return
        for handle in self._after:
            assert isinstance(handle, LateTicket)
            handle.run()
        copy()


class LateCopies(CopyEngine):
    """Makes copies when their handle is waited for, or at random times.

    Holds GPU memory weakly, as a GPU does: a copy from memory that was freed in the meantime returns garbage.
    """

    def __init__(self, seed: int = 0, eager_share: float = 0.2) -> None:
        self._random = random.Random(seed)
        self._eager_share = eager_share
        self._pending: list[LateTicket] = []
        self.num_out = 0
        self.num_back = 0
        self.sizes: dict[str, list[int]] = {"out": [], "back": []}
        """Bytes of each request."""
        self.captures = False
        """What `is_capturing` says."""
        self.waits = Waits()
        """What `timed_waits` says."""
        self.num_timed = 0

    def is_capturing(self) -> bool:
        return self.captures

    def out(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        return self.request("out", spans, after)

    def back(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        return self.request("back", spans, after)

    def request(self, direction: str, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        """Queues the copies of one call of `out` or `back`; tests that watch or refuse copies replace it."""
        self.sizes[direction].append(sum(span.nbytes for span in spans))
        return (self._out if direction == "out" else self._back)(spans, after)

    def _out(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        self.num_out += len(spans)
        weak = [(host_part(span), _Weak(span)) for span in spans]

        def copy() -> None:
            for host, gpu in weak:
                source = gpu.tensor()
                host.fill_(GARBAGE) if source is None else host.copy_(source)

        return self._queue(copy, after)

    def _back(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        self.num_back += len(spans)
        weak = [(host_part(span), _Weak(span)) for span in spans]
        for _, gpu in weak:
            memory = gpu.tensor()
            assert memory is not None
            memory.fill_(GARBAGE)

        def copy() -> None:
            for host, gpu in weak:
                destination = gpu.tensor()
                if destination is not None:
                    destination.copy_(host)

        return self._queue(copy, after)

    def wait(self, handle: CopyHandle) -> None:
        assert isinstance(handle, LateTicket)
        handle.run()

    def has_pending(self) -> bool:
        return not all(handle.reached() for handle in self._pending)

    def synchronize(self) -> None:
        for handle in self._pending:
            handle.run()

    @contextmanager
    def timed_waits(self) -> Iterator[Waits]:
        self.num_timed += 1
        yield self.waits

    def _queue(self, copy: Callable[[], None], after: Iterable[CopyHandle]) -> LateTicket:
        handle = LateTicket(copy, after)
        self._pending = [other for other in self._pending if not other.reached()] + [handle]
        for other in self._random.sample(self._pending, len(self._pending)):
            if self._random.random() < self._eager_share:
                other.run()
        return handle


def host_part(span: Span) -> torch.Tensor:
    """Returns the span's host memory, uint8 [nbytes]."""
    return span.host[span.offset : span.offset + span.nbytes]


def assert_empty(host_pool: PinnedHostPool) -> None:
    host_pool.take_all([])  # collects what was given back
    assert host_pool.used_bytes == 0


class _Weak:
    def __init__(self, span: Span) -> None:
        self._ref = StorageWeakRef(span.gpu)
        self._length = span.nbytes

    def tensor(self) -> torch.Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (self._length,))
