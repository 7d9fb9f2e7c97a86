"""Copies activations between GPU and host, each direction on a stream of its own."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from nemo_offload_rl.memory.pinned import cut_at_locks
from nemo_offload_rl.memory.streams import WaitClock, Waits, record_current_stream


class CopyHandle(Protocol):
    """Identifies copies that were requested."""

    def reached(self) -> bool:
        """Tell whether the copies are done."""
        ...

    def covers(self, other: "CopyHandle") -> bool:
        """Tell whether the other copies are done once these are."""
        ...


class Span(NamedTuple):
    """Pairs GPU memory with the host memory that it is copied to or from.

    Attributes:
        gpu: a GPU storage, copied from its first byte on.
        host: uint8, page-locked in chunks (`memory.pinned.LOCK_CHUNK_BYTES`).
        offset: where the copied bytes begin in `host`.
        nbytes: bytes to copy.
    """

    gpu: torch.UntypedStorage
    host: torch.Tensor
    offset: int
    nbytes: int


class CopyEngine(Protocol):
    """Makes copies, ordered only by the caller's stream and by the handles that they have to follow."""

    def is_capturing(self) -> bool:
        """Tell whether the caller's stream is being captured in a CUDA graph."""
        ...

    def out(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        """Copies to the host, after the work queued on the caller's stream and the copies in `after`."""
        ...

    def back(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        """Copies to the GPU, after `after` and the caller's stream, whose queued work may still use that GPU memory."""
        ...

    def wait(self, handle: CopyHandle) -> None:
        """Makes later work of the caller's stream wait for these copies."""
        ...

    def wait_to_free(self, handle: CopyHandle) -> None:
        """Makes the stream that requested these copies wait for them before it uses their memory again.

        Does nothing during a capture. Captures begin on an idle GPU, so that the copies of an eager pass whose storages
        are garbage-collected meanwhile are done, and to wait for an event from outside of a capture would end it.
        """
        if not self.is_capturing():
            self.wait(handle)

    def synchronize(self) -> None:
        """Return when all copies are done."""
        ...

    def timed_waits(self) -> AbstractContextManager[Waits]:
        """Time the waits of the caller's streams inside; an engine that cannot time its waits counts none."""
        return nullcontext(Waits())


class _CurrentStream:
    """Caches the caller's streams on one GPU by raw handle: `torch.cuda.current_stream` makes an object each time."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._known: dict[int, torch.cuda.Stream] = {}

    def __call__(self) -> torch.cuda.Stream:
        handle = torch._C._cuda_getCurrentRawStream(self._device)
        stream = self._known.get(handle)
        if stream is None:
            stream = self._known[handle] = torch.cuda.current_stream(self._device)
        return stream


class _RequestEvent(CopyHandle):
    """Covers all copies that were queued on a copy stream so far; the stream makes them in order."""

    def __init__(
        self, copy_stream: "SpanCopyStream", number: int, event: torch.cuda.Event, caller: torch.cuda.Stream
    ) -> None:
        self._copy_stream, self._number, self.event = copy_stream, number, event
        self.caller = caller
        """The stream that was current when the copies were requested and their memory was allocated."""
        self.waiter: torch.cuda.Stream | None = None
        """The last stream that waits for the event; a layer's storages share a handle, and need one wait."""

    def reached(self) -> bool:
        return bool(self.event.query())

    def covers(self, other: CopyHandle) -> bool:
        return (
            isinstance(other, _RequestEvent)
            and self._copy_stream is other._copy_stream
            and self._number >= other._number
        )

    def __del__(self) -> None:
        # Streams that already wait for the event are not affected when it is recorded again.
        self._copy_stream.unused_events.append(self.event)


class SpanCopyStream:
    """Queues copies of spans in one direction, on a stream of its own.

    Where the CPU limits the speed, each call counts: a request takes three times as long between a model's kernels as
    in a loop of its own. So events are reused, and copies are queued by address, through the driver: `Tensor.copy_`
    needs a tensor on both sides and a change of the stream. Together these were a quarter of the manager's time
    (docs/decisions/activation-manager.md).
    """

    def __init__(self, device: torch.device, *, to_host: bool) -> None:
        from cuda.bindings import driver

        self.stream = torch.cuda.Stream(device)
        self.unused_events: list[torch.cuda.Event] = []
        self._current_stream = _CurrentStream(self.stream.device_index)
        self._to_host = to_host
        self._num_requests = 0
        self._memcpy = driver.cuMemcpyAsync
        self._stream_of_driver = driver.CUstream(self.stream.cuda_stream)

    def enqueue(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        """Queue copies after the work queued on the caller's stream and the copies in `after`."""
        begin, caller = self._event(), self._current_stream()
        begin.record(caller)
        begin.wait(self.stream)
        self.unused_events.append(begin)
        for handle in dict.fromkeys(after):  # most are duplicates: that of a group, or of the last copy
            assert isinstance(handle, _RequestEvent)
            handle.event.wait(self.stream)
        self.copy_all(spans)
        end = self._event()
        end.record(self.stream)
        self._num_requests += 1
        return _RequestEvent(self, self._num_requests, end, caller)

    def copy_all(self, spans: Iterable[Span]) -> None:
        """Queue copies; torch must have been called in this thread before, so that torch's CUDA context is current.

        Raises:
            RuntimeError: the driver refused one.
        """
        for span in spans:  # both addresses are relative to the start of `host`, as cuts are
            gpu, host = span.gpu.data_ptr() - span.offset, span.host.data_ptr()
            for start, stop in cut_at_locks(span.offset, span.nbytes):
                there, here = (host, gpu) if self._to_host else (gpu, host)
                (error,) = self._memcpy(there + start, here + start, stop - start, self._stream_of_driver)
                if error:
                    raise _refused(error, span, to_host=self._to_host)

    def _event(self) -> torch.cuda.Event:
        return self.unused_events.pop() if self.unused_events else torch.cuda.Event()


class CudaCopies(CopyEngine):
    """Makes copies on two streams of one GPU, with an event for each request.

    Args:
        device: the GPU.
        graphs: whether CUDA graphs may be under capture. If False, `is_capturing` does not call the driver, which saves
            three calls a group.
    """

    def __init__(self, device: torch.device, *, graphs: bool = False) -> None:
        self.copy_streams = {"out": SpanCopyStream(device, to_host=True), "back": SpanCopyStream(device, to_host=False)}
        self._current_stream = _CurrentStream(self.copy_streams["out"].stream.device_index)
        self._graphs = graphs
        self._mark = partial(record_current_stream, torch.device(device))
        self._clock: WaitClock | None = None  # no null object: each wait of each step looks it up

    def is_capturing(self) -> bool:
        """See `CopyEngine`."""
        return self._graphs and torch.cuda.is_current_stream_capturing()

    def out(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        """See `CopyEngine`."""
        return self.copy_streams["out"].enqueue(spans, after)

    def back(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        """See `CopyEngine`."""
        return self.copy_streams["back"].enqueue(spans, after)

    def wait(self, handle: CopyHandle) -> None:
        """See `CopyEngine`."""
        assert isinstance(handle, _RequestEvent)
        stream = self._current_stream()
        if handle.waiter is stream:
            return
        handle.waiter = stream
        if self._clock is None or self.is_capturing():
            handle.event.wait(stream)
            return
        with self._clock.wait():
            handle.event.wait(stream)

    def wait_to_free(self, handle: CopyHandle) -> None:
        """See `CopyEngine`; the requesting stream waits, in whichever thread the garbage collector runs."""
        assert isinstance(handle, _RequestEvent)
        with torch.cuda.stream(handle.caller):
            super().wait_to_free(handle)

    def synchronize(self) -> None:
        """See `CopyEngine`."""
        for copy_stream in self.copy_streams.values():
            copy_stream.stream.synchronize()

    @contextmanager
    def timed_waits(self) -> Iterator[Waits]:
        """See `CopyEngine`; waits under capture are not timed."""
        self._clock = WaitClock(self._mark)
        try:
            with self._clock.running() as waits:
                yield waits
        finally:
            self._clock = None


def _refused(error: Any, span: Span, *, to_host: bool) -> RuntimeError:
    direction = "to the host" if to_host else "to the GPU"
    return RuntimeError(
        f"cuMemcpyAsync failed with {error.name} for {span.nbytes} bytes of activations {direction}; an earlier "
        "kernel may have caused it: set CUDA_LAUNCH_BLOCKING=1 to find it"
    )
