"""Provides the window, a ring of slots of GPU memory that chunks of optimizer state pass through, and its copies.

Lays out optimizer state in flat arrays of host memory, and cuts these into chunks that each fill a window's slot. There
is one array for each kind of state (masters, exp_avg, ...), with all parameters one after another. A chunk is the same
range of elements of every array, and so takes a few large copies, wherever it cuts a parameter.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.memory.gpu_range import RangeMaker
from nemo_offload_rl.memory.pinned import HostSegment, PinnedArena, cut_at_locks
from nemo_offload_rl.memory.streams import CopyStream, Event, StagingRing
from nemo_offload_rl.memory.units import MIB, round_up
from nemo_offload_rl.residency.transfer import BackedRange

ALIGNMENT = 256
"""In elements. Parameters begin, and are cut, at multiples of it, so that kernels process each element as in the whole
parameter: in vectors on a CPU, and with aligned loads on a GPU."""


@dataclass(frozen=True)
class Field:
    """Describes a kind of state that every parameter of a layout has."""

    key: str
    """The key in `optimizer.state[parameter]`; `MASTER` for the parameter itself."""
    dtype: torch.dtype


MASTER = "master"


@dataclass(frozen=True)
class Piece:
    """Describes the part of a parameter that is in a chunk."""

    index: int
    """The parameter's index in the layout."""
    start: int
    stop: int
    """The piece is elements `start` up to `stop` of the parameter."""
    offset: int
    """Where the piece begins in the chunk, in elements."""

    @property
    def length(self) -> int:
        """Returns the number of its elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Describes a range of elements of the arrays, and the pieces of parameters in it."""

    begin: int
    end: int
    pieces: tuple[Piece, ...]


class FlatLayout:
    """Locates the state of each parameter in host memory, and in a slot of the window.

    Args:
        fields: the kinds of state that each parameter has.
        numels: number of elements of each parameter, none of them 0.
        slot_bytes: the most bytes that a chunk may take in the window.

    Raises:
        ValueError: a slot cannot hold `ALIGNMENT` elements.
    """

    def __init__(self, fields: Sequence[Field], numels: Sequence[int], slot_bytes: int) -> None:
        self.fields = tuple(fields)
        self._numels = tuple(numels)
        *starts, total = itertools.accumulate((round_up(numel, ALIGNMENT) for numel in numels), initial=0)
        self._starts = starts
        self._length = total
        *offsets, self.nbytes = itertools.accumulate((field.dtype.itemsize * total for field in fields), initial=0)
        self._offsets = offsets
        element_bytes = sum(field.dtype.itemsize for field in fields)
        self._chunk_length = slot_bytes // element_bytes // ALIGNMENT * ALIGNMENT
        if not self._chunk_length:
            raise ValueError(
                f"A slot of {slot_bytes} bytes is too small for {ALIGNMENT} elements of {element_bytes} bytes each."
            )
        self.chunks = tuple(self._cut())

    def in_host(self, field: int, begin: int, length: int) -> slice:
        """Returns the byte range of host memory with `length` elements of a field's array."""
        size = self.fields[field].dtype.itemsize
        start = self._offsets[field] + begin * size
        return slice(start, start + length * size)

    def of_parameter(self, field: int, index: int) -> slice:
        """Returns the byte range of host memory with a field of a parameter."""
        return self.in_host(field, self._starts[index], self._numels[index])

    def in_slot(self, field: int, begin: int, length: int) -> slice:
        """Returns the byte range of a slot with `length` elements of a chunk's field."""
        size = self.fields[field].dtype.itemsize
        start = sum(other.dtype.itemsize for other in self.fields[:field]) * self._chunk_length + begin * size
        return slice(start, start + length * size)

    def _cut(self) -> Iterator[Chunk]:
        first = 0
        for begin in range(0, self._length, self._chunk_length):
            end = min(begin + self._chunk_length, self._length)
            pieces = []
            while first < len(self._numels) and self._starts[first] + self._numels[first] <= begin:
                first += 1
            for index in range(first, len(self._numels)):
                start, stop = self._starts[index], self._starts[index] + self._numels[index]
                if start >= end:
                    break
                low, high = max(start, begin), min(stop, end)
                if low < high:
                    pieces.append(Piece(index, low - start, high - start, low - begin))
            yield Chunk(begin, end, tuple(pieces))


Part = tuple[slice, torch.Tensor]
"""Bytes of a host segment, and the uint8 GPU tensor of the same size that they are copied to or from."""


class HostCopies:
    """Copies between the window and host memory, on a stream for each direction.

    Without a GPU the calling thread makes the copies. Those of a segment that is not page-locked go through the staging
    ring, and are done when the call returns.

    Args:
        device: the GPU.
        arena: provides the staging buffers.

    Attributes:
        out: the stream to the host.
        back: the stream to the GPU.
    """

    def __init__(self, device: torch.device, arena: PinnedArena) -> None:
        self.out, self.back = CopyStream(device), CopyStream(device)
        self._device = device
        self._arena = arena
        self._staging: StagingRing | None = None

    def to_gpu(self, segment: HostSegment, parts: list[Part]) -> None:
        """Queue copies of a segment's bytes into GPU memory, after the work queued on `back`."""
        if self._is_staged(segment):
            with self._ring(self.back) as ring:
                for where, gpu in parts:
                    ring.to_gpu(segment.tensor[where], gpu, self.back.stream)
        else:
            self.back.copy_all((gpu, host) for host, gpu in _cut(segment, parts))

    def to_host(self, segment: HostSegment, parts: list[Part]) -> None:
        """Queue copies of GPU memory into a segment's bytes, after the work queued on `out`."""
        if self._is_staged(segment):
            with self._ring(self.out) as ring:
                for where, gpu in parts:
                    ring.to_host(gpu, segment.tensor[where], self.out.stream)
        else:
            self.out.copy_all(_cut(segment, parts))

    def close(self) -> None:
        """Free the staging buffers; a second call does nothing."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    @contextlib.contextmanager
    def _ring(self, stream: CopyStream) -> Iterator[StagingRing]:
        """Yields the staging ring; after a failure, waits for copies through its buffers."""
        if self._staging is None:
            self._staging = StagingRing(self._arena)
        try:
            yield self._staging
        except BaseException:
            stream.mark().wait()
            raise

    def _is_staged(self, segment: HostSegment) -> bool:
        return self._device.type == "cuda" and not segment.pinned


def _cut(segment: HostSegment, parts: list[Part]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cuts parts into pairs of host and GPU memory that do not span two page-locked ranges."""
    pairs = []
    for where, gpu in parts:
        for begin, end in cut_at_locks(where.start, where.stop - where.start):
            pairs.append((segment.tensor[begin:end], gpu[begin - where.start : end - where.start]))
    return pairs


NUM_SLOTS = 4
"""One slot is copied into, one is computed on, and one is copied out of; one more keeps copies from waiting for the
exact end of one another."""
DEFAULT_WINDOW_BYTES = 512 * MIB
"""With four slots of three fields each, copies are of 43 MiB, and run at the link's limit."""
_SLOT_ALIGNMENT = 512  # bytes, as torch's allocator aligns


@dataclass(frozen=True, eq=False)
class HostArrays:
    """Holds the arrays of a layout in host memory."""

    layout: FlatLayout
    segment: HostSegment


@dataclass(eq=False)
class Slot:
    """Describes a part of the window, which holds one chunk at a time, and its last copies.

    Attributes:
        memory: uint8 [slot_bytes].
        arrived: the end of the last copy into it.
        left: the end of the last copy out of it.
    """

    memory: torch.Tensor
    arrived: Event | None = None
    left: Event | None = None

    def view(self, layout: FlatLayout, field: int, offset: int, length: int) -> torch.Tensor:
        """Returns `length` elements of a field of the slot's chunk: a 1-D tensor of the field's dtype."""
        return self.memory[layout.in_slot(field, offset, length)].view(layout.fields[field].dtype)


def slot_bytes(window_bytes: int) -> int:
    """Returns the size of one slot of a window."""
    return window_bytes // NUM_SLOTS // _SLOT_ALIGNMENT * _SLOT_ALIGNMENT


class Window:
    """Passes chunks through a ring of slots in a range of GPU memory.

    Args:
        nbytes: size of the window.
        device: the GPU.
        ranges: makes the range, which is not mapped yet.
        copies: copies between the window and the host.

    Attributes:
        copies: copies between the window and the host.
        backed: the range of the window.
        last_out: the end of the last copy to the host.
    """

    def __init__(self, nbytes: int, device: torch.device, ranges: RangeMaker, copies: HostCopies) -> None:
        size = slot_bytes(nbytes)
        self.copies = copies
        self.backed = BackedRange(ranges(NUM_SLOTS * size, device, round_up(NUM_SLOTS * size, 2 * MIB)), None)
        self._slot_bytes = size
        self._slots: list[Slot] = []
        self._next = 0
        self._is_closed = False
        self.last_out: Event | None = None
        self._discard: Callable[[], None] | None = None

    def claim(self, discard: Callable[[], None]) -> None:
        """Make the caller the owner of the slots; the chunks of another owner are discarded.

        Args:
            discard: makes the caller forget its chunks; called when another claims the window, or its memory is freed.
        """
        if self._discard != discard:
            self.discard()
        self._discard = discard

    def discard(self) -> None:
        """Make the owner of the slots forget its chunks."""
        if self._discard is not None:
            self._discard()
        self._discard = None

    def fetch(self, arrays: HostArrays, chunk: Chunk) -> Slot:
        """Queue the copy of a chunk into the next slot, after the last copy out of it and all earlier copies out."""
        slot = self._next_slot()
        if slot.left is not None:
            self.copies.back.follow(slot.left)
        self.copies.to_gpu(arrays.segment, _parts(arrays, chunk, slot))
        slot.arrived = self.copies.back.mark()
        return slot

    def take(self) -> Slot:
        """Returns the next slot without copying into it; makes the current stream wait for the last copy out of it."""
        slot = self._next_slot()
        if slot.left is not None:
            slot.left.wait_on_current_stream()
        return slot

    def store(self, arrays: HostArrays, chunk: Chunk, slot: Slot) -> None:
        """Queue the copy of a slot's chunk to the host, after the work queued on the current stream."""
        self.copies.out.follow_current_stream()
        self.copies.to_host(arrays.segment, _parts(arrays, chunk, slot))
        slot.left = self.last_out = self.copies.out.mark()

    def wait(self) -> None:
        """Wait until all stored chunks are on the host."""
        if self.last_out is not None:
            self.last_out.wait()

    def release_slots(self) -> None:
        """Make the current stream wait for every copy, and forget the slots: their memory is about to be freed."""
        self.discard()
        for slot in self._slots:
            for event in (slot.arrived, slot.left):
                if event is not None:
                    event.wait_on_current_stream()
        self._slots = []

    def close(self) -> None:
        """Free the memory once all copies are done; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for slot in self._slots:
            if slot.arrived is not None:
                slot.arrived.wait()
        self.wait()
        self._slots = []
        self.backed.range.close()
        self.copies.close()

    def _next_slot(self) -> Slot:
        if not self._slots:  # made here, since a `TorchRange` has an address only while it is mapped
            self._slots = [Slot(memory) for memory in self.backed.range.tensor.split(self._slot_bytes)]
        self._next = (self._next + 1) % NUM_SLOTS
        return self._slots[self._next]


def _parts(arrays: HostArrays, chunk: Chunk, slot: Slot) -> list[tuple[slice, torch.Tensor]]:
    layout, length = arrays.layout, chunk.end - chunk.begin
    return [
        (layout.in_host(field, chunk.begin, length), slot.memory[layout.in_slot(field, 0, length)])
        for field in range(len(layout.fields))
    ]
