"""Moves ranges to the host and back on streams of their own, and frees GPU memory as the copies end.

A helper thread does all of it, since queueing the copies of 18 GB takes as long as 260 ms: the queue's length is
limited. To the host, it queues some copies ahead, and unmaps each chunk when its copy has ended. To the GPU, it maps a
chunk, queues its copy, and maps the next chunk while that copy runs; mapping all chunks first would leave the link idle
for 5% of the time.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from nemo_offload_rl.memory.gpu_range import GpuRange, OutOfGpuMemoryError
from nemo_offload_rl.memory.pinned import LOCK_CHUNK_BYTES, HostSegment, PinnedArena
from nemo_offload_rl.memory.streams import CopyStream, Event, StagingRing, record_current_stream

_COPIES_AHEAD = 4  # chunks that are being copied to the host while older ones are unmapped
_SPIN_FOR_LAST = 2  # chunks whose events are polled, since a caller may be waiting for the end


@dataclass(frozen=True)
class BackedRange:
    """Pairs a range with the host memory that it is copied to, or with None if its contents are only ever dropped."""

    range: GpuRange
    host: HostSegment | None

    def host_tensor(self) -> torch.Tensor:
        """Returns the host side: uint8 [nbytes]."""
        assert self.host is not None
        return self.host.tensor[: self.range.nbytes]


Chunk = tuple[BackedRange, slice]
"""A range, and the bytes of it that are copied as one."""


class ChunkError(RuntimeError):
    """Raised when there was no memory for a chunk; memory that the move had mapped before was unmapped.

    Attributes:
        backed: the range whose chunk it is.
        offset: byte of the range at which the chunk begins.
    """

    def __init__(self, backed: BackedRange, offset: int, message: str) -> None:
        super().__init__(message)
        self.backed = backed
        self.offset = offset


class Gate:
    """Keeps a move to the host from freeing memory until the gate is opened or cancelled; its copies run meanwhile."""

    def __init__(self) -> None:
        self._decided = threading.Event()
        self._is_open = False

    def open(self) -> None:
        """Let the move free its memory."""
        self._is_open = True
        self._decided.set()

    def cancel(self) -> None:
        """End the move without freeing memory; no effect on an open gate."""
        self._decided.set()

    def passes(self) -> bool:
        """Wait until the gate is opened or cancelled; return whether it is open."""
        self._decided.wait()
        return self._is_open


@dataclass(frozen=True)
class _Span:
    begin: Event
    end: Event


class Transfer:
    """Tracks a move that is under way, and whose copies the helper thread queues.

    Args:
        device: the device whose current stream may have to wait.
        nbytes: bytes that cross the link.
        helper: the helper thread's job; returns begin and end of the copies, or None if nothing is copied.
        check: see `Mover`.

    Attributes:
        on_arrival: called once, to queue work on the first stream that waits for the move, before its later work.
    """

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        helper: Future[_Span | None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.nbytes = nbytes
        self.on_arrival: Callable[[], None] | None = None
        self._device = device
        self._helper = helper
        self._check = check
        self._waited = 0.0
        self._asked: Event | None = None

    @property
    def is_queued(self) -> bool:
        """Returns whether the helper thread is done; copies back to the GPU may still run."""
        return self._helper.done()

    @property
    def has_failed(self) -> bool:
        """Returns whether the helper thread has ended with an error."""
        return self._helper.done() and self._helper.exception() is not None

    def wait(self) -> None:
        """Waits until the helper thread is done; for a move to the host, until its GPU memory is freed.

        Raises:
            ChunkError: the device had no memory for it.
        """
        self._check()
        start = time.perf_counter()
        try:
            self._helper.result()
        finally:
            self._waited += time.perf_counter() - start

    def wait_on_current_stream(self) -> None:
        """Makes later work of the caller's stream wait until the data is in place.

        Raises:
            ChunkError: the device had no memory for it.
        """
        self.wait()
        span = self._helper.result()
        if span is not None:
            if self._asked is None:
                self._asked = record_current_stream(self._device)
            span.end.wait_on_current_stream()
        if self.on_arrival is not None:
            self.on_arrival()
            self.on_arrival = None

    def copy_seconds(self) -> float:
        """Returns the seconds from the first byte on the link to the last; waits for the copies."""
        span = self._helper.result()
        if span is None:
            return 0.0
        span.end.wait()
        return span.end.seconds_since(span.begin)

    def exposed_seconds(self) -> float:
        """Returns the seconds for which the caller, or its stream, waited for this move; waits for the copies."""
        span, stalled = self._helper.result(), 0.0
        if span is not None and self._asked is not None:
            span.end.wait()
            self._asked.wait()
            stalled = span.end.seconds_since(self._asked)
        return self._waited + max(0.0, stalled)


class Mover:
    """Moves backed ranges between a device and the host; a helper thread makes the moves in the order of the calls.

    Another thread drops ranges, so that their memory is free before long copies that began earlier end.

    Args:
        device: the GPU; or the CPU, where the same moves are made between two places of host memory.
        arena: holds the ranges' host memory; provides staging buffers for segments that are not page-locked.

    Attributes:
        checks: called before each move and each wait for one; they raise once state is invalid.
    """

    def __init__(self, device: torch.device, arena: PinnedArena) -> None:
        self.device = device
        self.checks: list[Callable[[], None]] = []
        self._arena = arena
        self._staging: StagingRing | None = None
        self._staging_lock = threading.Lock()  # the helper thread and a swap of weights may both use it
        self._out, self._back = CopyStream(device), CopyStream(device)
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="residency")
        self._dropper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="residency drop")

    def check(self) -> None:
        """Run `checks`, which raise once state is invalid."""
        for check in self.checks:
            check()

    def out(self, backed_ranges: Sequence[BackedRange], gate: Gate | None = None) -> Transfer:
        """Copy every chunk to the host after the work queued on the current stream, and unmap it after its copy.

        Args:
            backed_ranges: mapped ranges.
            gate: nothing is unmapped until it is open, nor if it is cancelled.
        """
        backed_ranges = tuple(backed_ranges)  # the list may grow meanwhile, when tensors are adopted
        chunks = [(backed, index) for backed in backed_ranges for index in range(len(backed.range.chunks))]
        ready = record_current_stream(self.device)

        def out() -> _Span | None:
            self._out.follow(ready)
            begin = self._out.mark()
            copying: deque[tuple[BackedRange, int, Event]] = deque()

            def give_back_oldest() -> None:
                backed, index, copied = copying.popleft()
                copied.wait()
                backed.range.unmap(index)

            for left, (backed, index) in zip(range(len(chunks), 0, -1), chunks, strict=True):
                if len(copying) == _COPIES_AHEAD:
                    if gate is not None and not gate.passes():
                        return None
                    give_back_oldest()
                self._copy_out(backed, backed.range.chunks[index])
                copying.append((backed, index, self._out.mark(spins=left <= _SPIN_FOR_LAST)))
            end = self._out.mark()
            if gate is not None and not gate.passes():
                return None
            while copying:
                give_back_oldest()
            return _Span(begin, end)

        return self._transfer(_bytes(backed_ranges), out)

    def back(self, backed_ranges: Sequence[BackedRange]) -> Transfer:
        """Map every chunk and copy it from the host."""

        def back() -> _Span:
            begin = None
            for backed, index in self._mapped(backed_ranges):
                begin = begin or self._back.mark()
                self._copy_back(backed, backed.range.chunks[index])
            end = self._back.mark()
            return _Span(begin or end, end)

        return self._transfer(_bytes(backed_ranges), back)

    def save(self, backed_ranges: Sequence[BackedRange]) -> None:
        """Copy mapped ranges to the host, and wait for the copies; the ranges stay mapped."""
        self._out.follow_current_stream()
        for backed in backed_ranges:
            for chunk in backed.range.chunks:
                self._copy_out(backed, chunk)
        self._out.mark().wait()

    def exchange(
        self, backed_ranges: Sequence[BackedRange], others: Sequence[BackedRange], changed: list[Chunk] | None = None
    ) -> Transfer:
        """Copy mapped ranges to the host, and copy the host memory of `others` into each chunk as soon as it is saved.

        Both directions of the link are busy at once. The caller makes the stream that uses the contents wait for the
        transfer.

        Args:
            backed_ranges: the ranges, with the host memory that they are saved to.
            others: the same ranges, with the host memory that is copied into them.
            changed: each chunk is appended once its save is queued, before it is overwritten. If this raises,
                `put_back` of these chunks undoes it; all other chunks are unchanged, and their saved copies not needed.
        """
        changed = [] if changed is None else changed
        self._out.follow_current_stream()
        self._back.follow_current_stream()
        begin = self._back.mark()
        for backed, other in zip(backed_ranges, others, strict=True):
            assert backed.range is other.range
            for chunk in backed.range.chunks:
                self._copy_out(backed, chunk)
                self._back.follow(self._out.mark())
                changed.append((backed, chunk))
                self._copy_back(other, chunk)
        return self._queued(_bytes(others), _Span(begin, self._back.mark()))

    def put_back(self, chunks: Sequence[Chunk]) -> Transfer:
        """Copy the host side of chunks into mapped ranges behind the current stream's work; may be called again."""
        self._back.follow_current_stream()
        begin = self._back.mark()
        for backed, chunk in chunks:
            self._copy_back(backed, chunk)
        return self._queued(sum(chunk.stop - chunk.start for _, chunk in chunks), _Span(begin, self._back.mark()))

    def drop(self, backed_ranges: Sequence[BackedRange]) -> Transfer:
        """Unmap every chunk after the work queued on the current stream; contents are lost."""
        mark = record_current_stream(self.device)

        def drop() -> None:
            mark.wait()
            for backed in backed_ranges:
                for index in range(len(backed.range.chunks)):
                    backed.range.unmap(index)

        return self._transfer(0, drop, self._dropper)  # not behind the helper thread's copies

    def take(self, backed_ranges: Sequence[BackedRange]) -> Transfer:
        """Map every chunk; its contents are undefined."""

        def take() -> None:
            for _ in self._mapped(backed_ranges):
                pass

        return self._transfer(0, take)

    def close(self) -> None:
        """End the threads when they are done, and free the staging buffers; a second call does nothing."""
        self._helper.shutdown(wait=True)
        self._dropper.shutdown(wait=True)
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def _transfer(
        self, nbytes: int, job: Callable[[], _Span | None], thread: ThreadPoolExecutor | None = None
    ) -> Transfer:
        self.check()
        return Transfer(self.device, nbytes, (thread or self._helper).submit(job), self.check)

    def _queued(self, nbytes: int, span: _Span) -> Transfer:
        helper: Future[_Span | None] = Future()
        helper.set_result(span)
        return Transfer(self.device, nbytes, helper)

    def _copy_out(self, backed: BackedRange, chunk: slice) -> None:
        for source, destination in _pieces(backed.range.tensor[chunk], backed.host_tensor()[chunk]):
            if self._is_staged(backed):
                with self._ring(self._out) as ring:
                    ring.to_host(source, destination, self._out.stream)
            else:
                self._out.copy(destination, source)

    def _copy_back(self, backed: BackedRange, chunk: slice) -> None:
        for source, destination in _pieces(backed.host_tensor()[chunk], backed.range.tensor[chunk]):
            if self._is_staged(backed):
                with self._ring(self._back) as ring:
                    ring.to_gpu(source, destination, self._back.stream)
            else:
                self._back.copy(destination, source)

    @contextlib.contextmanager
    def _ring(self, copy_stream: CopyStream) -> Iterator[StagingRing]:
        """Yields the staging ring to one thread at a time; after a failure, waits for copies through its buffers."""
        with self._staging_lock:
            if self._staging is None:
                self._staging = StagingRing(self._arena)
            try:
                yield self._staging
            except BaseException:
                copy_stream.mark().wait()
                raise

    def _is_staged(self, backed: BackedRange) -> bool:
        return self.device.type == "cuda" and backed.host is not None and not backed.host.pinned

    def _mapped(self, backed_ranges: Sequence[BackedRange]) -> Iterator[tuple[BackedRange, int]]:
        """Maps one chunk after another and yields each; if there is no memory for one, unmaps all of them."""
        done: list[tuple[BackedRange, int]] = []
        for backed in backed_ranges:
            for index, chunk in enumerate(backed.range.chunks):
                try:
                    self._map(backed.range, index)
                except OutOfGpuMemoryError as error:
                    self._back.mark().wait()
                    for mapped, mapped_index in done:
                        mapped.range.unmap(mapped_index)
                    raise ChunkError(backed, chunk.start, str(error)) from error
                done.append((backed, index))
                yield backed, index

    def _map(self, gpu_range: GpuRange, index: int) -> None:
        """Map a chunk, if need be in the memory of ranges that are being dropped."""
        try:
            map_chunk(gpu_range, index)
        except OutOfGpuMemoryError:
            self._dropper.submit(lambda: None).result()  # behind all earlier drops, which may wait for kernels
            map_chunk(gpu_range, index)


def map_chunk(gpu_range: GpuRange, index: int) -> None:
    """Map a chunk, if need be after releasing torch's cached but unused memory.

    Raises:
        OutOfGpuMemoryError: even then there is no memory.
    """
    try:
        gpu_range.map(index)
    except OutOfGpuMemoryError:
        torch.cuda.empty_cache()
        gpu_range.map(index)


def _pieces(source: torch.Tensor, destination: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields pairs of pieces that do not span two page-locked ranges, which CUDA may refuse to copy."""
    return zip(source.split(LOCK_CHUNK_BYTES), destination.split(LOCK_CHUNK_BYTES), strict=True)


def _bytes(backed_ranges: Sequence[BackedRange]) -> int:
    return sum(backed.range.nbytes for backed in backed_ranges)
