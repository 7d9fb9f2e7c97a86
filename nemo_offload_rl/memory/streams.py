"""Provides copy streams, their events, a clock for waits, and copies through a ring of small pinned buffers."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.units import MIB


class Event(Protocol):
    """Marks a point in a stream's work."""

    def wait(self) -> None:
        """Block the calling thread until the event is reached."""
        ...

    def wait_on_current_stream(self) -> None:
        """Makes later work of the caller's stream wait for the event."""
        ...

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Makes later work of a stream wait for the event."""
        ...

    def seconds_since(self, earlier: Self) -> float:
        """Returns the seconds from `earlier` to this event, both reached; below 0 if `earlier` was reached later."""
        ...


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream, *, spins: bool) -> None:
        # A helper thread that waits for half a second must not spin on a core meanwhile.
        self._event = torch.cuda.Event(enable_timing=True, blocking=not spins)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def wait_on_current_stream(self) -> None:
        self.hold(torch.cuda.current_stream())

    def hold(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)

    def seconds_since(self, earlier: Self) -> float:
        return earlier._event.elapsed_time(self._event) / 1000


class _HostEvent:
    def __init__(self) -> None:
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Does nothing: copies on a CPU are complete when the event is recorded."""

    def wait_on_current_stream(self) -> None:
        """Does nothing: there are no streams on a CPU."""

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Does nothing: there are no streams on a CPU."""

    def seconds_since(self, earlier: Self) -> float:
        return self._time - earlier._time


class CopyStream:
    """Queues copies in one direction on a stream of its own; without a GPU, the calling thread makes them."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = None if self.stream is None else self.stream.device_index

    def follow_current_stream(self) -> None:
        """Makes later copies wait for all work queued on the caller's stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def follow(self, mark: Event) -> None:
        """Makes later copies wait for an event of another copy stream."""
        if self.stream is not None:
            mark.hold(self.stream)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""
        self.copy_all([(destination, source)])

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue copies of (destination, source) pairs, changing the current stream only once for all of them."""
        if self.stream is None:
            for destination, source in pairs:
                destination.copy_(source)
            return
        # As `torch.cuda.stream` without its device checks: that takes 9 us on the host of an H200, this a third.
        current = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self.stream)
        try:
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(current)

    def mark(self, *, spins: bool = False) -> Event:
        """Records an event after the copies queued so far.

        Args:
            spins: whether a thread that waits for the event polls it: it returns some 0.5 ms sooner, and keeps a core
                busy.
        """
        return _HostEvent() if self.stream is None else _CudaEvent(self.stream, spins=spins)


def record_current_stream(device: torch.device) -> Event:
    """Records an event after the work queued on the caller's stream so far."""
    return _CudaEvent(torch.cuda.current_stream(), spins=False) if device.type == "cuda" else _HostEvent()


@dataclass
class Waits:
    """Holds the measurements of a `WaitClock`; 0 until it has stopped."""

    seconds_waited: float = 0.0
    """Sum of all waits; a wait that delayed nothing still counts some microseconds."""
    seconds: float = 0.0
    """Time from the clock's start to its stop."""


class WaitClock:
    """Times the waits of the caller's stream, and its whole work from the clock's start to its stop.

    Args:
        mark: records an event on the stream that is current when it is called. Waits may be on several streams and
            threads, as in backward passes, as long as both ends of a wait are recorded on the same one.
    """

    def __init__(self, mark: Callable[[], Event]) -> None:
        self._mark = mark
        self._held: list[tuple[Event, Event]] = []

    @contextmanager
    def running(self) -> Iterator[Waits]:
        """Run the clock inside the context, whose end waits for the stream and fills in the yielded `Waits`."""
        waits = Waits()
        start = self._mark()
        yield waits
        stop = self._mark()
        stop.wait()
        waits.seconds = stop.seconds_since(start)
        for before, after in self._held:
            after.wait()  # it may be on another stream
            waits.seconds_waited += after.seconds_since(before)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Times the stream waits that are queued inside; not for graph captures, where events have no time."""
        before = self._mark()
        yield
        self._held.append((before, self._mark()))


NUM_BUFFERS = 4
BUFFER_BYTES = 32 * MIB  # the link reaches 97% of its rate with 16 MiB, 99% with 64 MiB


class StagingRing:
    """Copies between GPU and pageable host memory in pieces; copies over the link overlap with those on the CPU.

    The buffers are one segment of the arena, pageable if not even that can be page-locked. Not thread-safe; calls
    return when the last byte has arrived. Without CUDA, with CPU tensors on both sides and no stream, the same pieces
    go through the same buffers.

    Args:
        arena: provides the memory of the buffers until `close`.
        num_buffers: number of buffers, at least 2 for copies to overlap.
        buffer_bytes: size of one buffer.
    """

    def __init__(self, arena: PinnedArena, *, num_buffers: int = NUM_BUFFERS, buffer_bytes: int = BUFFER_BYTES) -> None:
        assert num_buffers > 0 and buffer_bytes > 0
        self._arena = arena
        self._segment = arena.allocate("staging", num_buffers * buffer_bytes)
        self._num_buffers = num_buffers
        self._buffer_bytes = buffer_bytes

    @property
    def pinned(self) -> bool:
        """Returns whether the buffers are page-locked."""
        return self._segment.pinned

    def to_host(self, source: torch.Tensor, destination: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Copy from the GPU to the host.

        Args:
            source: uint8 [nbytes] on the GPU; contiguous.
            destination: uint8 [nbytes] on the CPU; contiguous.
            stream: runs the copies over the link, after the work queued on it; None without CUDA.

        Raises:
            ValueError: if the tensors are not flat uint8 of the same size.
        """
        arriving: deque[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]] = deque()
        for buffer, piece, end in self._pieces(source, destination):
            if len(arriving) == self._num_buffers:
                _copy_out_of_buffer(*arriving.popleft())
            arriving.append((buffer, end, _copy(piece, buffer, stream)))
        while arriving:
            _copy_out_of_buffer(*arriving.popleft())

    def to_gpu(self, source: torch.Tensor, destination: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Copy from the host to the GPU.

        Args:
            source: uint8 [nbytes] on the CPU; contiguous.
            destination: uint8 [nbytes] on the GPU; contiguous.
            stream: runs the copies over the link, after the work queued on it; None without CUDA.

        Raises:
            ValueError: if the tensors are not flat uint8 of the same size.
        """
        leaving: deque[torch.cuda.Event | None] = deque()
        for buffer, piece, end in self._pieces(source, destination):
            if len(leaving) == self._num_buffers:
                _wait(leaving.popleft())
            buffer.copy_(piece)
            leaving.append(_copy(buffer, end, stream))
        while leaving:
            _wait(leaving.popleft())

    def close(self) -> None:
        """Return the buffers to the arena."""
        self._arena.release(self._segment)

    def _pieces(
        self, source: torch.Tensor, destination: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields (buffer, source piece, destination piece), all of the same size, taking the buffers in turn."""
        for tensor in (source, destination):
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(
                    f"The staging ring copies contiguous uint8 [nbytes]; got {tensor.dtype} {list(tensor.shape)}."
                )
        if source.numel() != destination.numel():
            raise ValueError(f"The staging ring got {source.numel()} bytes to copy into {destination.numel()}.")
        buffers = self._segment.tensor.split(self._buffer_bytes)
        pieces = zip(source.split(self._buffer_bytes), destination.split(self._buffer_bytes), strict=True)
        for index, (piece, end) in enumerate(pieces):
            yield buffers[index % self._num_buffers][: piece.numel()], piece, end


def _copy(source: torch.Tensor, destination: torch.Tensor, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Queues a copy on a stream and returns the event of its end; without a stream, copies at once."""
    if stream is None:
        destination.copy_(source)
        return None
    with torch.cuda.stream(stream):
        destination.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return event


def _copy_out_of_buffer(buffer: torch.Tensor, destination: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
    _wait(arrived)
    destination.copy_(buffer)


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
